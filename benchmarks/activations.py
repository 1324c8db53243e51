"""Memory and time of each way of activation checkpointing.

    python benchmarks/activations.py [--json] [--rounds 3] [--samples 8] [--length 512] [--bf16]

The model is the preset `llama-34m` (hidden 512, 8 layers, vocabulary 8192) with SDPA attention
and the loss in four chunks, not compiled; a step is forward and backward pass of one micro
batch. The modes take turns in one process with one thread, and the median of the rounds counts.
Memory is `rostra.memory.measure`'s activations at the peak, of a step of its own. Seconds are
those of the processor, which other work on the machine changes least. On a CUDA device it runs
there, and seconds are those of the clock.

On the CPU `offload` writes to a file in TMPDIR; how fast that is depends on the disk and on how
much of it the system keeps in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch

from rostra.config.schema import ModelSection
from rostra.memory import keep_freed_memory, measure
from rostra.models import create_model, scratch_config
from rostra.optim import chunked_cross_entropy
from rostra.parallel.activations import checkpoint_activations

VOCABULARY = 8192
# What guides to training say of each: memory saved, and time added.
GUIDES = {
    "none": ("", ""),
    "full": ("60%", "30 to 40%"),
    "every:2": ("", ""),
    "selective:attention": ("40%", "15 to 20%"),
    "selective:mlp": ("40%", "15 to 20%"),
    "selective:operations": ("40%", "15 to 20%"),
    "offload": ("80%", "50%"),
}
Row = dict[str, str | float | int]


def make_step(
    mode: str, samples: int, length: int, bf16: bool, device: torch.device
) -> Callable[[bool], float]:
    """A function that takes a step and returns its seconds, or, watched, bytes of activations."""
    section = ModelSection.model_validate({"preset": "llama-34m"})
    model = create_model(scratch_config(section, VOCABULARY, length, {}), 0, "sdpa")
    checkpoint_activations(model.to(device).train(), mode)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (samples, length + 1), generator=generator).to(device)

    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def backward() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            hidden = model.base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            loss, _ = chunked_cross_entropy(
                hidden, model.lm_head.weight, tokens[:, 1:], chunk=samples * length // 4
            )
        loss.backward()

    def step(watched: bool) -> float:
        model.zero_grad(set_to_none=True)
        if watched:
            with measure(model) as memory:
                backward()
            return memory.bytes["activations"]
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = clock()
        backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - began

    return step


def compare(rounds: int, samples: int, length: int, bf16: bool) -> list[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = {mode: make_step(mode, samples, length, bf16, device) for mode in GUIDES}
    kept = {mode: step(True) for mode, step in steps.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in GUIDES}
    for number in range(rounds):
        for mode in list(GUIDES)[:: 1 if number % 2 == 0 else -1]:
            seconds[mode].append(steps[mode](False))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    median = {mode: statistics.median(found) for mode, found in seconds.items()}
    return [
        {
            "mode": mode,
            "activation_bytes": int(kept[mode]),
            "memory": round(kept[mode] / kept["none"], 3),
            "seconds": round(median[mode], 3),
            "time": round(median[mode] / median["none"], 3),
        }
        for mode in GUIDES
    ]


def show(rows: list[Row]) -> None:
    print("| mode | activations, MiB | saved | guides | seconds | longer | guides |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        saved, longer = GUIDES[str(row["mode"])]
        size = int(row["activation_bytes"]) / 2**20
        print(
            f"| `{row['mode']}` | {size:,.0f} | {1 - float(row['memory']):.0%} | {saved} "
            f"| {row['seconds']:.2f} | {float(row['time']) - 1:.0%} | {longer} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = compare(arguments.rounds, arguments.samples, arguments.length, arguments.bf16)
    print(json.dumps(rows, indent=2)) if arguments.json else show(rows)


if __name__ == "__main__":
    main()
