"""Two ranks beside two processes that know nothing of each other: what data parallelism costs.

    python benchmarks/scaling.py [--json] [--rounds 5] [--steps 2] [--samples 8] [--reduction fp32]

The model is the Llama of 34 million parameters of `throughput.py` in bf16 autocast, compiled;
each rank has one thread, and in every step the same number of samples of 512 tokens. Two
processes hold three engines each: one by itself, one of two data-parallel ranks, one of two
ranks under ZeRO-1. The engines take turns, both processes at once, and the median over the
rounds of tokens a second, as a share of the independent processes' in the same round, counts.

`exposed` is the time of a step in which a rank waits for communication that the backward pass
did not hide: from the end of the backward pass until gradients are there, and, under ZeRO-1,
gathering the weights. `alone` is what the same communication takes with nothing to do beside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).parent))
from throughput import HEADS, HIDDEN, INNER, LAYERS, LENGTH, VOCABULARY, samples

MODES = ("independent", "ddp", "zero1")
LAYOUTS: dict[str, dict[str, Any]] = {
    "independent": {},
    "ddp": {"replicate": 2},
    "zero1": {"shard": 2, "sharding": "zero1"},
}


class Timed:
    """Seconds spent in a function, which is called as before."""

    def __init__(self, function: Any) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter()
        found = self.function(*args)
        self.seconds += time.perf_counter() - began
        return found


def engine_of(mode: str, count: int, reduction: str) -> Any:
    from rostra.build import build_engine
    from rostra.config import config_from_dict
    from rostra.events import Events
    from rostra.layout import Layout
    from rostra.models import create_model, scratch_config

    size = {"hidden_size": HIDDEN, "layers": LAYERS, "heads": HEADS, "intermediate_size": INNER}
    ranks = 1 if mode == "independent" else 2
    config = config_from_dict(
        {
            "model": {"architecture": "llama", "size": size},
            "data": {
                "sources": [{"type": "python_docs"}],
                "tokenizer": {"vocabulary": VOCABULARY},
                "sequence_length": LENGTH,
                "isolate_documents": False,
            },
            "train": {"steps": 1000, "global_batch_size": ranks * count},
        }
    )
    layout = Layout(count, 1, compute="bf16", compile=True, reduction=reduction, **LAYOUTS[mode])
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = create_model(scratch_config(config.model, VOCABULARY, LENGTH, special), 0)
    engine = build_engine(config, layout, model, torch.device("cpu"), 1000, Events())
    for name in ("collect", "publish"):
        setattr(engine.gradients, name, Timed(getattr(engine.gradients, name)))
    return engine


def serve(rank: int, store: str, count: int, reduction: str, connection: Connection) -> None:
    """Build the engines, then run what is asked for: (mode, steps)."""
    import torch.distributed as dist

    from rostra.batch import Batch
    from rostra.memory import keep_freed_memory
    from rostra.train import train_step

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    keep_freed_memory()
    engines = {"independent": engine_of("independent", count, reduction)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    engines |= {mode: engine_of(mode, count, reduction) for mode in MODES[1:]}
    tokens = samples(count)
    positions = torch.arange(LENGTH).repeat(count, 1)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)
    while True:
        mode, steps = connection.recv()
        if mode == "stop":
            dist.destroy_process_group()
            return
        if mode == "alone":
            connection.send(communicate(engines[steps]))
            continue
        gradients = engines[mode].gradients
        gradients.collect.seconds = gradients.publish.seconds = 0.0
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            train_step(engines[mode], batch)
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        exposed = gradients.collect.seconds + gradients.publish.seconds
        connection.send((seconds / steps, exposed / steps, busy / steps))


def communicate(engine: Any) -> float:
    """Seconds of the step's communication by itself."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    engine.gradients.collect()
    engine.gradients.publish()
    seconds = time.perf_counter() - began
    engine.gradients.clear()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--reduction", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    context = get_context("spawn")
    ranks: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            ours, theirs = context.Pipe()
            args = (rank, f"{folder}/store", asked.samples, asked.reduction, theirs)
            context.Process(target=serve, args=args, daemon=True).start()
            ranks.append(ours)

        def both(*command: Any) -> list[Any]:
            for connection in ranks:
                connection.send(command)
            return [connection.recv() for connection in ranks]

        for mode in MODES:
            both(mode, 3)  # compiling, and the optimizer's states
        rounds = [{mode: both(mode, asked.steps) for mode in MODES} for _ in range(asked.rounds)]
        alone = {
            mode: statistics.median(max(both("alone", mode)) for _ in range(3))
            for mode in MODES[1:]
        }
        for connection in ranks:
            connection.send(("stop", 0))
    report(asked, rounds, alone)


def report(asked: Any, rounds: list[dict[str, Any]], alone: dict[str, float]) -> None:
    found = {}
    for mode in MODES:
        times = [max(seconds for seconds, _, _ in each[mode]) for each in rounds]
        bases = [max(seconds for seconds, _, _ in each["independent"]) for each in rounds]
        exposed = [max(x for _, x, _ in each[mode]) for each in rounds]
        found[mode] = {
            "tokens_per_second": 2 * asked.samples * LENGTH / statistics.median(times),
            "share": statistics.median(b / t for b, t in zip(bases, times, strict=True)),
            "exposed_seconds": statistics.median(exposed),
            "alone_seconds": alone.get(mode, 0.0),
            "step_seconds": statistics.median(times),
        }
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    print("| | tokens/s | of two independent | step s | communication alone s | exposed s |")
    print("|---|---|---|---|---|---|")
    for mode, x in found.items():
        print(
            f"| {mode} | {x['tokens_per_second']:,.0f} | {x['share']:.1%} | "
            f"{x['step_seconds']:.2f} | {x['alone_seconds']:.3f} | {x['exposed_seconds']:.3f} |"
        )


if __name__ == "__main__":
    main()
