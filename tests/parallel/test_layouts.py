"""Every layout computes what one process computes."""

from __future__ import annotations

import gc
import math
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from common import CPU, batch_of, config_of, difference, model_of, part_of, run

from ranks import Ranks
from rostra.build import build_engine
from rostra.events import Events
from rostra.layout import Layout, refusals
from rostra.train import train_step


@cache
def alone(architecture: str, samples: int, compute: str = "fp32") -> dict[str, Any]:
    layout = {"micro_batch": samples, "accumulation": 1, "compute": compute}
    return run(architecture, layout, samples=samples)


def check(
    ranks: Ranks,
    architecture: str,
    layout: dict[str, Any],
    samples: int = 8,
    loss: float = 1e-5,
    norm: float = 1e-4,
    parameters: float = 1e-4,
) -> list[dict[str, Any]]:
    """What each rank found, compared with one process."""
    assert not refusals(Layout(**layout))
    size = 1
    for axis in ("replicate", "shard", "context", "tensor", "pipeline"):
        size *= layout.get(axis, 1)
    found = ranks.run(size, run, architecture, layout, 3, samples)
    expected = alone(architecture, samples, layout.get("compute", "fp32"))
    for each in found:
        assert each["tokens"] == expected["tokens"]
        assert each["evaluated"][1] == expected["evaluated"][1]
        assert abs(each["evaluated"][0] - expected["evaluated"][0]) < 100 * loss
        apart = difference(expected, each)
        assert apart["loss"] < loss, apart
        assert apart["norm"] < norm, apart
        assert apart["parameters"] < parameters, apart
    return found


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


@pytest.mark.parametrize("samples", [3, 5])
@pytest.mark.parametrize("name", ["ddp", "zero1", "full_shard", "ddp x pipeline"])
def test_ranks_with_unequal_numbers_of_samples(ranks: Ranks, name: str, samples: int) -> None:
    layout = {**STRATEGIES, **COMBINATIONS}[name]
    rows = -(-samples // 2)
    check(ranks, "llama", {"micro_batch": 1, "accumulation": rows, **layout}, samples)


def check_rounded(ranks: Ranks, layout: dict[str, Any]) -> None:
    """Rounding, which differs with the order of sums, turns a few steps of 3e-3 around: entries of
    parameters are compared on average, over all and within each parameter. A sample too few is
    8e-4 over all, 1.3e-3 in the worst parameter. In float32 norms agree to 1e-4, so what is
    further from float32 was rounded."""
    expected = alone("llama", 8, layout.get("compute", "fp32"))
    for each in check(ranks, "llama", layout, loss=1e-3, norm=1e-2, parameters=math.inf):
        apart = [
            (value.float() - each["parameters"][name].float()).abs()
            for name, value in expected["parameters"].items()
        ]
        assert max(float(x.mean()) for x in apart) < 1e-3
        assert float(torch.cat([x.flatten() for x in apart]).mean()) < 2e-4
        assert difference(alone("llama", 8), each)["norm"] > 1e-4


@pytest.mark.parametrize("compute", ["bf16", "fp16", "bf16_pure"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "full_shard", "tensor", "context"])
def test_half_precision(ranks: Ranks, name: str, compute: str) -> None:
    if compute == "bf16_pure" and name in ("full_shard", "tensor"):
        pytest.skip("refused by the table")
    layout = {"micro_batch": 2, "accumulation": 4, "compute": compute, **STRATEGIES[name]}
    check_rounded(ranks, layout)


@pytest.mark.parametrize("name", ["ddp", "zero1", "full_shard"])
def test_gradients_travel_in_16_bits(ranks: Ranks, name: str) -> None:
    layout = {"micro_batch": 2, "accumulation": 4, "reduction": "bf16", **STRATEGIES[name]}
    check_rounded(ranks, layout)


def left_behind(layout: dict[str, Any]) -> bool:
    """Whether a weight is still there when its engine is gone."""
    config, model = config_of(), model_of("llama")
    engine = build_engine(config, Layout(**layout), model, CPU, 10, Events())
    train_step(engine, part_of(batch_of(), engine))
    weight = weakref.ref(next(model.parameters()))
    del engine, model
    gc.collect()
    return weight() is not None


@pytest.mark.parametrize("name", ["ddp", "zero1", "full_shard", "tensor"])
def test_an_engine_leaves_no_weight_behind(ranks: Ranks, name: str) -> None:
    """Nor, with it, the groups of its mesh and their threads."""
    layout = {"micro_batch": 2, "accumulation": 4, **STRATEGIES[name]}
    assert ranks.run(2, left_behind, layout) == [False, False]


def test_a_single_process_with_master_weights_leaves_none_either() -> None:
    assert not left_behind({"micro_batch": 2, "accumulation": 4, "compute": "bf16_pure"})
