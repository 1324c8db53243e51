"""Seconds of a training step as planned, beside those measured, for many layouts on this machine.

    python benchmarks/plan_time.py [--calibrate] [--json] [--only NAME ...] [--steps 4]
                                   [--clock wall|processor]

Every layout trains some real steps of a model of 10 to 60 million parameters on 1, 2 or 4 gloo
ranks with one thread each, which share the machine's cores; the median step of the slowest rank
counts. `--calibrate` measures the machine first, as `rostra calibrate` does, under the same
conditions; without it the calibration that was saved is taken. On a machine that others use,
`--clock processor` takes the time that ranks were busy instead of the clock's: of one rank that
is the same, of several it leaves out waiting for each other.

`error` is planned over measured, less 1. `order` is the share of pairs of layouts whose measured
times differ by more than 10% (per token, as models and batches differ) that the plan has in the
same order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch

VOCABULARY = 8192
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 512, "layers": 8, "heads": 8, "intermediate_size": 1376},
    "llama-wide": {"hidden_size": 768, "layers": 6, "heads": 12, "intermediate_size": 2048},
    "qwen3": {
        "hidden_size": 512, "layers": 6, "heads": 8, "kv_heads": 4, "intermediate_size": 1536,
    },
    "gemma3": {
        "hidden_size": 512, "layers": 6, "heads": 4, "kv_heads": 1, "head_size": 128,
        "intermediate_size": 1536,
    },
    "gpt2": {"hidden_size": 512, "layers": 8, "heads": 8, "intermediate_size": 2048},
    "mistral": {
        "hidden_size": 384, "layers": 8, "heads": 6, "kv_heads": 2, "intermediate_size": 1344,
    },
}  # fmt: skip
LORA = {"adapter": {"kind": "lora", "rank": 8, "alpha": 16}}


@dataclass(frozen=True)
class Case:
    """A layout of a model; `layout` without what follows from the rest."""

    name: str
    model: str = "llama"
    length: int = 512
    samples: int = 2  # of a micro batch
    accumulation: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    documents: bool = True  # several in a sample


def _cases() -> Iterator[Case]:
    bf16 = {"compute": "bf16"}
    yield Case("plain")
    yield Case("bf16", layout=bf16)
    yield Case("bf16, 4 samples", samples=4, layout=bf16)
    yield Case("bf16, one document a sample", layout=bf16, documents=False)
    yield Case("bf16, 256 positions", length=256, samples=4, layout=bf16)
    yield Case("bf16, 1024 positions", length=1024, samples=1, layout=bf16)
    yield Case("bf16, 2048 positions", length=2048, samples=1, layout=bf16)
    yield Case("wide", "llama-wide", samples=1)
    yield Case("wide, bf16", "llama-wide", layout=bf16)
    yield Case("qwen3", "qwen3", layout=bf16)
    yield Case("gemma3", "gemma3", layout=bf16)
    yield Case("gpt2", "gpt2", layout=bf16)
    yield Case("gpt2, fp32", "gpt2", length=256)
    yield Case("mistral", "mistral", samples=4, layout=bf16)
    yield Case("accumulation", samples=1, accumulation=4, layout=bf16)
    for mode in ("full", "every:2", "selective:attention", "selective:mlp", "selective:operations"):
        yield Case(f"checkpointing {mode}", layout={**bf16, "activation_checkpointing": mode})
    yield Case("bf16_pure", layout={"compute": "bf16_pure"})
    yield Case("8-bit states", layout={**bf16, "optimizer_states": "int8"})
    yield Case("optimizer in backward", samples=1, layout={**bf16, "optimizer_in_backward": True})
    yield Case("sgd", sections={"optimizer": {"name": "sgd"}}, layout=bf16)
    yield Case("lion", sections={"optimizer": {"name": "lion"}}, layout=bf16)
    yield Case("LoRA", layout={**bf16, "adapter": "lora"}, sections=LORA)
    yield Case("LoRA, fp32", layout={"adapter": "lora"}, sections=LORA, samples=1)
    for kind in ("nf4", "int8"):
        yield Case(
            f"LoRA over {kind}",
            layout={**bf16, "adapter": "lora", "quantization": kind},
            sections={**LORA, "quantization": kind},
        )
    yield Case("IA3", layout={**bf16, "adapter": "ia3"}, sections={"adapter": {"kind": "ia3"}})
    yield Case("compiled", samples=4, layout={**bf16, "compile": True})
    yield Case("compiled, fp32", layout={"compile": True})
    yield Case("ddp", layout={**bf16, "replicate": 2})
    yield Case("ddp, fp32", samples=1, layout={"replicate": 2})
    yield Case("ddp, reduction in bf16", layout={**bf16, "replicate": 2, "reduction": "bf16"})
    for sharding in ("zero1", "shard_grad_op", "full_shard"):
        yield Case(sharding, layout={**bf16, "shard": 2, "sharding": sharding})
    yield Case(
        "full_shard, checkpointing",
        samples=1,
        accumulation=2,
        layout={
            **bf16, "shard": 2, "sharding": "full_shard", "activation_checkpointing": "full",
        },
    )  # fmt: skip
    yield Case("zero1, qwen3", "qwen3", layout={**bf16, "shard": 2, "sharding": "zero1"})
    yield Case("tensor", layout={**bf16, "tensor": 2})
    yield Case("ulysses", length=1024, samples=1, layout={**bf16, "context": 2})
    yield Case(
        "ring", length=1024, samples=1, layout={**bf16, "context": 2, "context_method": "ring"}
    )
    for schedule in ("gpipe", "1f1b"):
        yield Case(
            f"pipeline {schedule}",
            samples=1,
            accumulation=4,
            layout={**bf16, "pipeline": 2, "pipeline_schedule": schedule},
        )
    yield Case(
        "LoRA, full_shard",
        layout={**bf16, "adapter": "lora", "shard": 2, "sharding": "full_shard"},
        sections=LORA,
    )
    yield Case("ddp on 4", samples=1, layout={**bf16, "replicate": 4})
    yield Case("full_shard on 4", samples=1, layout={**bf16, "shard": 4, "sharding": "full_shard"})
    yield Case(
        "hybrid on 4",
        samples=1,
        layout={**bf16, "replicate": 2, "shard": 2, "sharding": "hybrid_shard"},
    )
    yield Case("tensor x replicate", samples=1, layout={**bf16, "tensor": 2, "replicate": 2})
    yield Case(
        "pipeline interleaved",
        samples=1,
        accumulation=4,
        layout={
            **bf16, "pipeline": 2, "stages": 2, "pipeline_schedule": "interleaved_1f1b",
            "replicate": 2,
        },
    )  # fmt: skip


CASES = tuple(_cases())


def made(case: Case) -> tuple[Any, Any, Any]:
    """The config, the model's shape and the layout of a case."""
    from rostra.config import config_from_dict
    from rostra.config.schema import ModelSection
    from rostra.layout import Layout
    from rostra.models import scratch_config

    architecture = case.model.split("-", maxsplit=1)[0]
    section = ModelSection.model_validate(
        {"architecture": architecture, "size": MODELS[case.model]}
    )
    special: dict[str, int | None] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    shape = scratch_config(section, VOCABULARY, 2048, special)
    layout = Layout(case.samples, case.accumulation, **case.layout)
    samples = case.samples * case.accumulation * layout.data
    config = config_from_dict(
        {
            "model": {"pretrained": "folder"},
            "data": {
                "sources": [{"type": "python_docs"}],
                "sequence_length": case.length,
                "isolate_documents": case.documents,
            },
            "train": {"steps": 1000, "global_batch_size": samples},
            "schedule": {"warmup": 0},
            **case.sections,
        }
    )
    return config, shape, layout


def measured(case: Case, steps: int) -> list[tuple[float, float]]:
    """Of each step, seconds by the clock and of the processor; a task of a rank."""
    import torch.distributed as dist

    from rostra.batch import Batch
    from rostra.build import build_engine
    from rostra.build.tuned import tune
    from rostra.events import Events
    from rostra.memory import keep_freed_memory
    from rostra.models import SeededWeights
    from rostra.models.weights import model_on_meta
    from rostra.train import train_step

    config, shape, layout = made(case)
    keep_freed_memory(config.adapter.kind == "none")  # as training does
    torch.manual_seed(0)
    model, weights = model_on_meta(shape), SeededWeights(shape, 0)
    if config.adapter.kind != "none":
        built = tune(model, weights, config)
        model, weights = built.model, built.weights
    engine = build_engine(config, layout, model, torch.device("cpu"), 1000, Events(), weights)
    rows = case.samples * case.accumulation
    tokens = torch.randint(0, VOCABULARY, (rows, case.length + 1))
    positions = torch.arange(case.length).repeat(rows, 1)
    if case.documents:
        for row in range(rows):
            border = case.length // 3 + 37 * row % (case.length // 3)
            positions[row, border:] -= border
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)
    found = []
    for _ in range(steps + 2):  # the first two make states, and compile
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        train_step(engine, batch)
        found.append((time.perf_counter() - began, time.process_time() - busy))
    engine.close()
    return found[2:]


def planned(case: Case) -> Any:
    """The plan's time for a case on this machine."""
    from rostra.hardware.machine import this_cluster
    from rostra.plan.job import job_of
    from rostra.plan.time import TimeModel

    config, shape, layout = made(case)
    return TimeModel(job_of(config, shape), this_cluster(layout.world_size))(layout)


def row_of(case: Case, ranks: list[list[tuple[float, float]]], clock: str) -> dict[str, Any]:
    from rostra.hardware import usable_cores

    steps = list(zip(*ranks, strict=True))
    walls = [max(wall for wall, _ in step) for step in steps]
    share = min(len(ranks), usable_cores())
    busy = [sum(used for _, used in step) / share for step in steps]
    time = planned(case)
    seconds = statistics.median(walls if clock == "wall" else busy)
    parts = {
        "compute": time.compute,
        "memory": time.memory,
        "recompute": time.recompute,
        "communication": sum(time.communication.values()),
        "bubble": time.bubble,
        "optimizer": time.optimizer,
        "overhead": time.overhead,
    }
    tokens = case.samples * case.accumulation * case.length * made(case)[2].data
    return {
        "name": case.name,
        "ranks": len(ranks),
        "tokens": tokens,
        "planned": time.step,
        "measured": seconds,
        "wall": statistics.median(walls),
        "busy": statistics.median(busy),
        "error": time.step / seconds - 1,
        "parts": parts,
    }


def order(rows: list[dict[str, Any]]) -> tuple[float, int]:
    """The share of pairs in the right order, and how many count."""
    right = count = 0
    for a, b in combinations(rows, 2):
        real = (a["measured"] / a["tokens"]) / (b["measured"] / b["tokens"])
        if max(real, 1 / real) > 1.1:
            told = (a["planned"] / a["tokens"]) / (b["planned"] / b["tokens"])
            right += (real > 1) == (told > 1)
            count += 1
    return right / max(1, count), count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calibrate", action="store_true", help="measure the machine first")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=None, metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import plan_time  # under its own name, for the ranks to find

    from rostra.errors import RostraError
    from rostra.workers.pool import Pool, RankFailed

    if asked.calibrate:
        from rostra.hardware.machine import save_calibration
        from rostra.plan.calibrate import calibrate

        measured_here = calibrate(_say)
        save_calibration(measured_here.to_dict())
        _say(
            f"calibrated in {measured_here.seconds:.0f} s; {len(measured_here.noisy)} of "
            f"{len(list(measured_here.figures()))} figures uncertain"
        )
    rows = []
    with Pool(seconds=600, quiet=True) as pool:
        for case in plan_time.CASES:
            if asked.only is not None and case.name not in asked.only:
                continue
            ranks = made(case)[2].world_size
            try:
                found = pool.run(ranks, plan_time.measured, case, asked.steps)
            except (RankFailed, RostraError) as error:
                _say(f"{case.name}: failed: {error}")
                continue
            rows.append(row_of(case, found, asked.clock))
            _say(f"{case.name}: {rows[-1]['measured']:.3f} s, {rows[-1]['error']:+.1%}")
    report(rows, asked.json)


def report(rows: list[dict[str, Any]], as_json: bool) -> None:
    errors = sorted(abs(row["error"]) for row in rows)
    share, pairs = order(rows)
    found = {
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "within_10_percent": sum(e <= 0.1 for e in errors) / len(errors),
        "order": share,
        "pairs": pairs,
        "rows": rows,
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    names = list(rows[0]["parts"])
    print(f"| layout | ranks | planned s | measured s | error | {' | '.join(names)} |")
    print("|---" * (5 + len(names)) + "|")
    for row in rows:
        parts = " | ".join(f"{row['parts'][name]:.3f}" for name in names)
        print(
            f"| {row['name']} | {row['ranks']} | {row['planned']:.3f} | {row['measured']:.3f} "
            f"| {row['error']:+.1%} | {parts} |"
        )
    print(
        f"\n{len(rows)} layouts: error {found['median_error']:.1%} in the median, "
        f"{found['worst_error']:.1%} at worst; {share:.1%} of {pairs} pairs in order"
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    main()
