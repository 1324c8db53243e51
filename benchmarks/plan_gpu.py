"""Memory and seconds of a step as planned, beside those measured, on one GPU.

    python benchmarks/plan_gpu.py [--only TEXT] [--steps 8] [--budget SECONDS]
        [--json] [--output FILE]

Each configuration trains a few steps of a model with random weights in a process of its own; what
the plan says does not fit is not tried, and listed. `reserved` is torch's `max_memory_reserved`,
beside the plan's memory without the device's context; `step` the median after two steps. A run
out of memory of what the plan said fits is counted: there should be none.

Without `--output` a Markdown table goes to standard output; with it to FILE, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

LORA = {"adapter": {"kind": "lora", "rank": 16, "alpha": 32}}
VOCABULARY = 32_768


@dataclass(frozen=True)
class Case:
    """A configuration. `layout` without what follows from the rest."""

    preset: str
    samples: int
    length: int = 2048
    accumulation: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        told = [f"{key}={value}" for key, value in self.layout.items() if key != "compute"]
        optimizer = self.sections.get("optimizer", {}).get("name")
        told += [optimizer] if optimizer else []
        size = f"{self.accumulation}x{self.samples}x{self.length}"
        return ", ".join([self.preset, size, *told])


def _cases() -> Iterator[Case]:
    bf16 = {"compute": "bf16"}
    for preset, samples in (
        ("llama-125m", (4, 16, 32)),
        ("gpt2", (8, 16)),
        ("qwen3-0.6b", (2, 4, 8)),
        ("gemma3-1b", (2, 4)),
        ("llama-3.2-1b", (1, 2, 4, 8)),
    ):
        for count in samples:
            yield Case(preset, count, 1024 if preset == "gpt2" else 2048, layout=bf16)
    big = "llama-3.2-1b"
    for mode in ("full", "every:2", "selective:operations", "selective:mlp", "offload"):
        yield Case(big, 4, layout={**bf16, "activation_checkpointing": mode})
    yield Case(big, 16, layout={**bf16, "activation_checkpointing": "full"})
    for length, samples in ((512, 16), (8192, 1), (16384, 1)):
        yield Case(big, samples, length, layout={**bf16, "activation_checkpointing": "full"})
    yield Case(big, 2, accumulation=4, layout=bf16)
    yield Case(big, 4, layout={"compute": "fp32"})
    yield Case(big, 4, layout={"compute": "bf16_pure"})
    for states in ("int8", "int4", "fp8"):
        yield Case(big, 4, layout={**bf16, "optimizer_states": states})
    yield Case(big, 4, layout={**bf16, "optimizer_in_backward": True})
    yield Case(big, 4, layout={**bf16, "offload_optimizer": "cpu"})
    for name in ("sgd", "lion"):
        yield Case(big, 4, layout=bf16, sections={"optimizer": {"name": name}})
    for preset in ("llama-125m", big):
        yield Case(preset, 4, layout={**bf16, "compile": True})
    yield Case(big, 4, layout={"compute": "fp8", "compile": True})
    lora = {**bf16, "adapter": "lora"}
    for preset in (big, "llama-3-8b", "mistral-7b"):
        yield Case(preset, 2, layout=lora, sections=LORA)
        for kind in ("nf4", "int8"):
            sections = {**LORA, "quantization": kind}
            yield Case(preset, 2, layout={**lora, "quantization": kind}, sections=sections)
    yield Case(
        "llama-3-8b",
        8,
        layout={**lora, "quantization": "nf4", "activation_checkpointing": "full"},
        sections={**LORA, "quantization": "nf4"},
    )
    yield Case("llama-3-8b", 2, layout={**bf16, "activation_checkpointing": "full"})


CASES = tuple(_cases())


def made(case: Case) -> tuple[Any, Any, Any]:
    """The config, the model's shape and the layout of a case."""
    from rostra.config import config_from_dict
    from rostra.config.schema import ModelSection
    from rostra.layout import Layout
    from rostra.models import scratch_config

    special: dict[str, int | None] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    section = ModelSection.model_validate({"preset": case.preset})
    shape = scratch_config(section, VOCABULARY, case.length, special)
    layout = Layout(case.samples, case.accumulation, **case.layout)
    clip = {"stability": {"clip": None}} if layout.optimizer_in_backward else {}
    config = config_from_dict(
        {
            "model": {"pretrained": "folder"},
            "data": {"sources": [{"type": "python_docs"}], "sequence_length": case.length},
            "train": {"steps": 1000, "global_batch_size": case.samples * case.accumulation},
            "schedule": {"warmup": 0},
            **clip,
            **case.sections,
        }
    )
    return config, shape, layout


def planned(case: Case) -> Any:
    """The plan's candidate, and whether it fits this GPU."""
    from rostra.hardware import this_cluster
    from rostra.plan.job import job_of
    from rostra.plan.planner import assess, room_of

    config, shape, layout = made(case)
    cluster = this_cluster()
    candidate = assess(job_of(config, shape), cluster, layout)
    return candidate, not room_of(cluster).shortage(candidate.memory, 1)


def measured(case: Case, steps: int) -> dict[str, Any]:
    """Real steps; in a process that does nothing else."""
    from rostra.batch import Batch
    from rostra.build import build_engine
    from rostra.build.tuned import tune
    from rostra.events import Events
    from rostra.hardware import best_device
    from rostra.models import SeededWeights
    from rostra.models.weights import model_on_meta
    from rostra.train import train_step

    config, shape, layout = made(case)
    device = best_device()
    model, weights = model_on_meta(shape), SeededWeights(shape, 0)
    if config.adapter.kind != "none":
        built = tune(model, weights, config)
        model, weights = built.model, built.weights
    try:
        engine = build_engine(config, layout, model, device, 1000, Events(), weights)
        torch.cuda.reset_peak_memory_stats()
        rows, length = case.samples * case.accumulation, config.data.sequence_length
        tokens = torch.randint(0, VOCABULARY, (rows, length + 1))
        positions = torch.arange(length).repeat(rows, 1)
        batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)
        seconds = []
        for _ in range(steps + 2):  # the first two make states, and compile
            torch.cuda.synchronize()
            began = time.perf_counter()
            train_step(engine, batch)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    return {
        "step": statistics.median(seconds[2:]),
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
    }


def row_of(index: int, steps: int) -> dict[str, Any]:
    from rostra.plan.memory.allocator import outside

    case = CASES[index]
    candidate, fits = planned(case)
    row = {
        "name": case.name,
        "fits": fits,
        "planned_bytes": candidate.memory.total - int(outside(candidate.layout)),
        "planned_live": candidate.memory.live,
        "planned_step": candidate.time.step,
    }
    if not fits:
        return row
    command = [sys.executable, __file__, "--one", str(index), "--steps", str(steps)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if ran.returncode:
        return {**row, "failed": ran.stderr.strip().splitlines()[-1:]}
    row |= json.loads(ran.stdout.splitlines()[-1])
    if "step" in row:
        row["memory_error"] = row["planned_bytes"] / row["reserved"] - 1
        row["live_error"] = row["planned_live"] / row["allocated"] - 1
        row["time_error"] = row["planned_step"] / row["step"] - 1
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n",
        "| configuration | planned GB | reserved GB | error | planned s | measured s | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row['name']} | {row['planned_bytes'] / 1e9:.2f} "
        if "step" in row:
            lines.append(
                f"{start}| {row['reserved'] / 1e9:.2f} | {row['memory_error']:+.1%} "
                f"| {row['planned_step']:.3f} | {row['step']:.3f} | {row['time_error']:+.1%} |"
            )
        else:
            why = row.get("out_of_memory") or row.get("failed") or "does not fit"
            lines.append(f"{start}| {why} | | {row['planned_step']:.3f} | | |")
    done = [row for row in rows if "step" in row]
    for key in ("memory_error", "live_error", "time_error") if done else ():
        errors = [abs(row[key]) for row in done]
        lines.append(
            f"\n{key.replace('_', ' ')} of {len(done)}: {statistics.median(errors):.1%} in the "
            f"median, {max(errors):.1%} at worst"
        )
    lines.append(f"\nout of memory though planned: {sum('out_of_memory' in row for row in rows)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="in the configuration's name")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--budget", type=float, default=None, help="begin none after so long")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("plan_gpu: there is no CUDA device here")
    if asked.one is not None:
        print(json.dumps(measured(CASES[asked.one], asked.steps)))
        return
    began, rows = time.monotonic(), []
    chosen = [i for i, case in enumerate(CASES) if asked.only in case.name]
    in_time = itertools.takewhile(
        lambda _: asked.budget is None or time.monotonic() - began < asked.budget, chosen
    )
    for index in in_time:
        rows.append(row_of(index, asked.steps))
        print(json.dumps(rows[-1]), file=sys.stderr)
    text = json.dumps(rows, indent=2) if asked.json else table(rows)
    if asked.output is not None:
        asked.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
