"""Published peaks of memory beside what the formulas foretell: `rostra.plan.memory`.

    python benchmarks/published_memory.py PATH/torchtitan_llama3.csv

The rows are torchtitan's, of Llama 3 on H100s (its `benchmarks` folder, December 2024): what
PyTorch's allocator had reserved at the peak, on the worst rank. torchtitan is described as a
layout with its conventions; no constant belongs to a row.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from rostra.config import Config, config_from_dict
from rostra.hardware.catalogue import read_cluster
from rostra.layout import Layout
from rostra.models.shapes import find_shape
from rostra.plan.job import job_of
from rostra.plan.memory import TORCHTITAN, MemoryModel, outside

SHAPES = {
    "llama3_8b": "meta-llama/Llama-3.1-8B",
    "llama3_70b": "meta-llama/Llama-3.1-70B",
    "llama3_405b": "meta-llama/Llama-3.1-405B",
}
CHECKPOINTING = {"selective": "selective:operations", "full": "full"}


def layout_of(row: dict[str, str]) -> Layout:
    """The row's layout. A pipeline cuts the local batch into as many micro batches as it has
    ranks."""
    pipeline, samples = int(row["pipeline"]), int(row["local_batch_size"])
    micro_batches = pipeline if pipeline > 1 else 1
    interleaved = "interleaved" in row["schedule"].lower()
    schedule = "interleaved_1f1b" if interleaved else row["schedule"].lower() or "none"
    return Layout(
        samples // micro_batches,
        micro_batches,
        shard=int(row["data_shard"]),
        tensor=int(row["tensor"]),
        pipeline=pipeline,
        stages=2 if interleaved else 1,
        context=int(row["context"]),
        context_method="ring",
        sharding="full_shard",
        pipeline_schedule=schedule,  # type: ignore[arg-type]
        activation_checkpointing=CHECKPOINTING[row["activation_checkpointing"]],
        compute="fp8" if row["float8"] == "True" else "bf16",
        compile=row["compile"] == "True",
    )


def config_of(row: dict[str, str]) -> Config:
    return config_from_dict(
        {
            "model": {"preset": "llama-3-8b"},
            "data": {
                "sources": [{"type": "python_docs"}],
                "tokenizer": {"vocabulary": 300},
                "sequence_length": int(row["sequence_length"]),
                "isolate_documents": False,
            },
            "train": {"steps": 1, "global_batch_size": int(row["global_batch_size"])},
        }
    )


def compare(row: dict[str, str]) -> dict[str, Any]:
    """Foretold and measured GiB of a row."""
    layout, config = layout_of(row), config_of(row)
    nodes = -(-layout.world_size // 8)
    cluster = read_cluster(f"{nodes}x8xH100" if nodes > 1 else f"{layout.world_size}xH100")
    job = job_of(config, find_shape(SHAPES[row["model"]], job_length(row)))
    memory = MemoryModel(job, cluster, TORCHTITAN)(layout)
    foretold = (memory.total - outside(layout)) / 2**30
    measured = float(row["peak_memory_gib"])
    return {
        "model": row["model"],
        "gpus": int(row["gpus"]),
        "layout": layout.describe(),
        "foretold_gib": foretold,
        "measured_gib": measured,
        "error": foretold / measured - 1,
        "gib": {kind: size / 2**30 for kind, size in memory.kinds.items()},
    }


def job_length(row: dict[str, str]) -> int:
    return int(row["sequence_length"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with arguments.csv.open() as file:
        rows = [compare(row) for row in csv.DictReader(file) if row["peak_memory_gib"]]
    mean = sum(abs(row["error"]) for row in rows) / len(rows)
    if arguments.json:
        json.dump({"rows": rows, "mean_error": mean}, sys.stdout, indent=2)
        return
    print("model        GPUs  foretold  measured   error  layout")
    for row in rows:
        print(
            f"{row['model']:12} {row['gpus']:4}  {row['foretold_gib']:8.1f}  "
            f"{row['measured_gib']:8.1f}  {row['error']:+6.1%}  {row['layout']}"
        )
    worst = max(abs(row["error"]) for row in rows)
    print(f"mean error {mean:.1%}, largest {worst:.1%}, over {len(rows)} rows")


if __name__ == "__main__":
    main()
