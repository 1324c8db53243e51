"""Predicted and published throughput, row by row: MPT by llm-foundry on A100s and H100s, Llama 3
by torchtitan on H100s. The files are CSV tables with a row a measurement; see docs/plan-time.md.

    python benchmarks/published_throughput.py FOLDER [--parts] [--json]

FOLDER has mpt_throughput.csv and torchtitan_llama3.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from transformers import AutoConfig, PretrainedConfig

from rostra.config import Config
from rostra.hardware.catalogue import read_cluster
from rostra.layout import Layout
from rostra.plan.conventions import TORCHTITAN, Conventions
from rostra.plan.job import Job, job_of
from rostra.plan.results import Time
from rostra.plan.time import TimeModel

TITAN = "torchtitan"
GPUS_OF = {
    "a100_40gb": "A100-40GB",
    "a100_80gb": "A100-80GB",
    "h100_80gb": "H100",
    "h100_96gb_hbm2e_500w": "H100-96GB",
}
LENGTHS, GPUS = (1024, 4096, 16384), (16, 64, 256)  # of rows held out while choosing constants
HALF_REDUCED = ("fsdp", "nemo")  # trainers whose gradients are reduced in bf16
ELSE = Path(__file__).parent / "published_elsewhere.csv"
PARTS = ("compute", "memory", "recompute", "bubble", "optimizer", "overhead")

# llm-foundry: FSDP of PyTorch 2.0 with bf16 activations, fused LayerNorm and cross-entropy,
# FlashAttention in Triton; `mixed_precision` DEFAULT reduces gradients in float32, PURE in bf16.
FOUNDRY = Conventions(logits="whole", fused=True, attention="flash1", half_stream=True)
ELSEWHERE = {
    TITAN: TORCHTITAN,
    # Megatron-LM of 2022: attention's scores are written, softmax with mask is one kernel.
    "megatron": Conventions(
        logits="whole",
        fused=True,
        attention="materialised",
        half_stream=True,
        copied_bytes=8,
    ),
    # FSDP of PyTorch 2.1, all in bf16, not compiled.
    "fsdp": Conventions(logits="whole", half_stream=True),
    # NeMo with Transformer Engine: fused kernels, cuDNN's attention, everything asynchronous.
    "nemo": Conventions(
        logits="whole",
        fused=True,
        attention="flash3",
        half_stream=True,
        copied_bytes=8,
        asynchronous=("tensor", "pipeline", "shard"),
    ),
}


@dataclass(frozen=True)
class Row:
    """One published measurement, as what the time model takes."""

    name: str
    group: str
    job: Job
    layout: Layout
    hardware: str
    conventions: Conventions
    tokens_per_second: float  # of one GPU

    @property
    def held_out(self) -> bool:
        """Whether constants were chosen without this row."""
        return self.job.length in LENGTHS or self.layout.world_size in GPUS

    @property
    def time(self) -> Time:
        model = TimeModel(self.job, read_cluster(self.hardware), conventions=self.conventions)
        return model(self.layout)

    @property
    def parts(self) -> str:
        """Shares of the step."""
        time = self.time
        seconds = {n: getattr(time, n) for n in PARTS} | time.communication
        return ", ".join(f"{n} {x / time.step:.0%}" for n, x in seconds.items() if x > 0)

    @property
    def predicted(self) -> float:
        tokens = self.job.global_batch * self.job.length
        return tokens / self.time.step / self.layout.world_size

    @property
    def error(self) -> float:
        """Of the time of a step, as a share of the measured."""
        return self.tokens_per_second / self.predicted - 1


def job(shape: PretrainedConfig, length: int, batch: int) -> Job:
    config = Config.model_validate(
        {
            "model": {"pretrained": "published"},
            "data": {
                "sources": [{"type": "text", "path": "none"}],
                "sequence_length": length,
                "isolate_documents": False,
            },
            "train": {"steps": 1, "global_batch_size": batch},
        }
    )
    return job_of(config, shape)


@cache
def mpt(hidden: int, layers: int, heads: int, length: int) -> PretrainedConfig:
    """An MPT as llm-foundry trained it then: GPT-2's structure, with biases and learned
    positions."""
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": length}
    return AutoConfig.for_model("gpt2", vocab_size=50368, activation_function="gelu", **sizes)


def foundry(path: Path) -> Iterator[Row]:
    for row in csv.DictReader(path.open()):
        number = {k: int(v) for k, v in row.items() if v.isdigit()}
        gpus, length = number["gpus"], number["sequence_length"]
        shape = mpt(number["hidden_size"], number["num_layers"], number["num_heads"], length)
        kind = GPUS_OF[row["gpu"]]
        layout = Layout(
            number["micro_batch_size"],
            number["grad_accumulation"],
            shard=gpus,
            sharding=row["sharding_strategy"].lower(),
            activation_checkpointing={"True": "full", "False": "none"}[
                row["activation_checkpointing"]
            ],
            compute="fp8" if row["precision"] == "amp_fp8" else "bf16",
            reduction="bf16" if row["precision"] == "bf16" else "fp32",
        )
        yield Row(
            f"{row['model']} {length} {gpus}x{kind} mb{layout.micro_batch}",
            f"{kind} {'fp8' if layout.compute == 'fp8' else ''}".strip(),
            job(shape, length, number["global_batch_size"]),
            layout,
            f"{gpus}x{kind}",
            FOUNDRY,
            float(row["tokens_per_second_per_gpu"]),
        )


LLAMA = {  # hidden, intermediate, layers, heads
    "llama3_8b": (4096, 14336, 32, 32),
    "llama3_70b": (8192, 28672, 80, 64),
    "llama3_405b": (16384, 53248, 126, 128),
}


@cache
def llama(name: str) -> PretrainedConfig:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict(zip(names, LLAMA[name], strict=True))
    return AutoConfig.for_model("llama", vocab_size=128256, num_key_value_heads=8, **sizes)


def titan(path: Path) -> Iterator[Row]:
    for row in csv.DictReader(path.open()):
        number = {k: int(v) for k, v in row.items() if v.isdigit()}
        pipeline, yes = number["pipeline"], {k: v == "True" for k, v in row.items()}
        stages = 2 if "interleaved" in row["schedule"].lower() else 1
        several = "interleaved_1f1b" if stages > 1 else "1f1b"
        micro_batches = pipeline * stages  # torchtitan's default
        layout = Layout(
            max(1, number["local_batch_size"] // micro_batches),
            micro_batches,
            shard=number["data_shard"],
            context=number["context"],
            context_method="ring",
            tensor=number["tensor"],
            pipeline=pipeline,
            stages=stages,
            pipeline_schedule=several if pipeline > 1 else "none",
            sharding="full_shard",
            activation_checkpointing={"selective": "selective:operations"}.get(
                row["activation_checkpointing"], row["activation_checkpointing"]
            ),
            compute="fp8" if yes["float8"] else "bf16",
            compile=yes["compile"],
        )
        conventions = replace(TORCHTITAN, asynchronous=("tensor",) * yes["async_tensor"])
        yield Row(
            f"{row['model']} {number['sequence_length']} {number['gpus']} {layout.describe()}",
            TITAN,
            job(llama(row["model"]), number["sequence_length"], number["global_batch_size"]),
            layout,
            f"{number['gpus']}x{GPUS_OF[row['gpu']]}",
            conventions,
            float(row["tokens_per_second_per_gpu"]),
        )


def elsewhere(path: Path) -> Iterator[Row]:
    """Rows of papers and other trainers, which no constant was chosen by."""
    for row in csv.DictReader(path.open()):
        number = {k: int(v) for k, v in row.items() if v and v.isdigit()}
        ranks = {k: number[k] for k in ("tensor", "pipeline", "stages", "shard", "replicate")}
        sizes = {
            "hidden_size": number["hidden"],
            "intermediate_size": number["intermediate"],
            "num_hidden_layers": number["layers"],
            "num_attention_heads": number["heads"],
            "num_key_value_heads": number["kv_heads"],
        }
        several = "interleaved_1f1b" if number["stages"] > 1 else "1f1b"
        rows, samples = number["global_batch"], number["micro_batch"]
        layout = Layout(
            samples,
            rows // (samples * number["shard"] * number["replicate"]),
            **ranks,
            pipeline_schedule=several if number["pipeline"] > 1 else "none",
            sharding=row["sharding"],
            activation_checkpointing=row["checkpointing"],
            compute=row["compute"],
            reduction="bf16" if row["trainer"] in HALF_REDUCED else "fp32",
            compile=row["trainer"] == TITAN,
        )
        speed = row["tokens_per_second_per_gpu"]
        if not speed:
            speed = rows * number["length"] / float(row["step_seconds"]) / layout.world_size
        shape = AutoConfig.for_model(row["family"], vocab_size=number["vocabulary"], **sizes)
        yield Row(
            f"{row['trainer']}, {shape.model_type} of {sizes['hidden_size']}x{number['layers']} "
            f"{number['length']} {row['hardware']} {layout.describe()}",
            f"elsewhere: {row['trainer']}",
            job(shape, number["length"], rows),
            layout,
            row["hardware"],
            ELSEWHERE[row["trainer"]],
            float(speed),
        )


def rows(folder: Path) -> list[Row]:
    """Those of the two files, as far as they are in `folder`."""
    files = {"mpt_throughput.csv": foundry, "torchtitan_llama3.csv": titan}
    return [
        row
        for name, read in files.items()
        if (folder / name).exists()
        for row in read(folder / name)
    ]


def summary(found: list[Row]) -> dict[str, dict[str, float]]:
    """Errors of the time of a step by group of rows."""
    groups = defaultdict(list)
    for row in found:
        other = row.group.startswith("elsewhere")
        known = ["all", "held out" if row.held_out else "chosen by"]
        for name in (*(["elsewhere"] if other else known), row.group):
            groups[name].append(row.error)
    return {
        name: {
            "rows": len(x),
            "mean_absolute": mean(map(abs, x)),
            "median_absolute": median(map(abs, x)),
            "mean": mean(x),
            "worst": max(x, key=abs),
        }
        for name, x in groups.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--parts", action="store_true", help="what each step goes to")
    asked = parser.parse_args()
    found = [*rows(asked.folder), *elsewhere(ELSE)]
    if asked.json:
        named = [
            {"name": r.name, "group": r.group, "held_out": r.held_out, "error": r.error,
             "measured": r.tokens_per_second, "predicted": r.predicted}
            for r in found
        ]  # fmt: skip
        json.dump({"rows": named, "summary": summary(found)}, sys.stdout, indent=2)
        return
    print("measured and predicted tokens/s of a GPU, and the error of the step's time")
    for row in found:
        print(f"{row.tokens_per_second:9,.0f} {row.predicted:9,.0f} {row.error:+7.1%}  {row.name}")
        if asked.parts:
            print(" " * 28, row.parts)
    for name, x in summary(found).items():
        print(
            f"{name:22} {x['rows']:3.0f} rows: mean absolute error {x['mean_absolute']:.1%}, "
            f"median {x['median_absolute']:.1%}, mean {x['mean']:+.1%}, worst {x['worst']:+.1%}"
        )


if __name__ == "__main__":
    main()
