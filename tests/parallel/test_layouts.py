"""Every layout computes what one process computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from common import difference, run

from ranks import Ranks


@cache
def alone(architecture: str, samples: int, **sections: Any) -> dict[str, Any]:
    return run(architecture, {"micro_batch": samples, "accumulation": 1}, samples=samples)


def check(ranks: Ranks, architecture: str, layout: dict[str, Any], samples: int = 8) -> None:
    size = 1
    for axis in ("replicate", "shard", "context", "tensor", "pipeline"):
        size *= layout.get(axis, 1)
    found = ranks.run(size, run, architecture, layout, 3, samples)
    expected = alone(architecture, samples)
    for each in found:
        assert each["tokens"] == expected["tokens"]
        assert each["evaluated"][1] == expected["evaluated"][1]
        assert abs(each["evaluated"][0] - expected["evaluated"][0]) < 1e-3
        apart = difference(expected, each)
        assert apart["loss"] < 1e-5, apart
        assert apart["norm"] < 1e-4, apart
        assert apart["parameters"] < 1e-4, apart


STRATEGIES = {
    "ddp": {"replicate": 2},
    "zero1": {"shard": 2, "sharding": "zero1"},
    "shard_grad_op": {"shard": 2, "sharding": "shard_grad_op"},
    "full_shard": {"shard": 2, "sharding": "full_shard"},
    "hybrid_shard": {"shard": 2, "replicate": 2, "sharding": "hybrid_shard"},
    "zero1, replicated": {"shard": 2, "replicate": 2, "sharding": "zero1"},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
}


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_alone(ranks: Ranks, name: str, architecture: str) -> None:
    if architecture == "qwen3_moe" and name in ("tensor", "context"):
        pytest.skip("experts: under data and sharded parallelism")
    check(ranks, architecture, {"micro_batch": 2, "accumulation": 4, **STRATEGIES[name]})


COMBINATIONS: dict[str, dict[str, Any]] = {
    "full_shard x tensor": {"shard": 2, "tensor": 2, "sharding": "full_shard"},
    "full_shard x context": {"shard": 2, "context": 2, "sharding": "full_shard"},
    "full_shard over context alone": {"context": 2, "sharding": "full_shard"},
    "full_shard x pipeline": {
        "shard": 2, "pipeline": 2, "sharding": "full_shard", "pipeline_schedule": "1f1b",
    },
    "shard_grad_op x tensor": {"shard": 2, "tensor": 2, "sharding": "shard_grad_op"},
    "ddp x tensor": {"replicate": 2, "tensor": 2},
    "ddp x context": {"replicate": 2, "context": 2},
    "ddp x pipeline": {"replicate": 2, "pipeline": 2, "pipeline_schedule": "gpipe"},
    "zero1 x context": {"shard": 2, "context": 2, "sharding": "zero1"},
    "zero1 x pipeline": {
        "shard": 2, "pipeline": 2, "sharding": "zero1", "pipeline_schedule": "1f1b",
    },
    "tensor x pipeline": {"tensor": 2, "pipeline": 2, "pipeline_schedule": "1f1b"},
    "tensor x context": {"tensor": 2, "context": 2},
    "context x pipeline": {"context": 2, "pipeline": 2, "pipeline_schedule": "1f1b"},
    "interleaved": {"pipeline": 2, "pipeline_schedule": "interleaved_1f1b", "stages": 2},
    "zero bubble": {"pipeline": 2, "pipeline_schedule": "zero_bubble", "stages": 2},
    "four stages": {"pipeline": 4, "pipeline_schedule": "1f1b"},
    "full_shard, all recomputed": {
        "shard": 2, "sharding": "full_shard", "activation_checkpointing": "full",
    },
    "full_shard, operations kept": {
        "shard": 2, "sharding": "full_shard",
        "activation_checkpointing": "selective:operations",
    },
    "full_shard x tensor, every other": {
        "shard": 2, "tensor": 2, "sharding": "full_shard", "activation_checkpointing": "every:2",
    },
    "full_shard, parameters on the host": {
        "shard": 2, "sharding": "full_shard", "offload_parameters": "cpu",
        "offload_optimizer": "cpu",
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination(ranks: Ranks, name: str, architecture: str) -> None:
    check(ranks, architecture, {"micro_batch": 2, "accumulation": 4, **COMBINATIONS[name]})
