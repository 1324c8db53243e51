"""Where DeepSpeed lays what it keeps: as its engine runs, and on a GPU with a host."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from transformers import LlamaConfig

from parallel.common import config_of
from rostra.hardware import read_cluster
from rostra.hardware.machine import this_cluster
from rostra.layout import Layout
from rostra.plan.job import Job, job_of
from rostra.plan.memory import MemoryModel
from rostra.plan.results import Memory
from rostra.plan.trace import traced
from support import need

CUT: dict[str, Any] = {"engine": "deepspeed", "shard": 4, "sharding": "full_shard"}
AWAY = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}


def job(layers: int = 2, hidden: int = 64, **sections: Any) -> Job:
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config = config_of(
        data={"sequence_length": 256, "isolate_documents": False},
        train={"global_batch_size": 24},
        **sections,
    )
    return job_of(config, shape)


def layout(micro_batch: int = 2, accumulation: int = 1, **fields: Any) -> Layout:
    return Layout(micro_batch, accumulation, **{**CUT, **fields})


RUN: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"compute": "bf16"},
    "bf16, checkpointed": {"compute": "bf16", "activation_checkpointing": "full"},
    "bf16 weights": {"compute": "bf16_pure"},
    "accumulation": {"accumulation": 2},
    "zero1, accumulation": {"sharding": "zero1", "accumulation": 3},
    "optimizer offloaded": {"offload_optimizer": "cpu"},
    "offloaded, bf16": {"compute": "bf16", **AWAY},
    "zero1, offloaded": {"sharding": "zero1", "offload_optimizer": "cpu"},
    "zero2, offloaded": {"sharding": "shard_grad_op", "offload_optimizer": "cpu"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "shard_grad_op"},
    "zero2, accumulation": {"sharding": "shard_grad_op", "accumulation": 3},
    "zero2, bf16 weights, accumulation": {
        "sharding": "shard_grad_op", "compute": "bf16_pure", "accumulation": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RUN)
def test_formulas_are_what_its_engine_holds(name: str) -> None:
    need(find_spec("deepspeed"), "deepspeed")
    x, cluster = layout(**RUN[name]), this_cluster()
    found = traced(job(), x, cluster)
    assert MemoryModel(job(), cluster)(x).live == pytest.approx(found.live, rel=0.03)


def on_gpus(of: Job, **fields: Any) -> Memory:
    return MemoryModel(of, read_cluster("4xA100-80GB"))(layout(**fields))


def test_an_offloaded_optimizer_leaves_gradients_and_states_on_the_host() -> None:
    there, away = on_gpus(job()), on_gpus(job(), offload_optimizer="cpu")
    each = job().sizes.parameters / 4
    assert away.kinds["gradients"] == away.kinds["optimizer"] == 0
    assert there.kinds["gradients"] == pytest.approx(4 * each, rel=0.01)
    # masters, two moments, and gradients twice, pinned in powers of two
    assert 20 * each <= away.host <= 2 * 20 * each
    assert there.host == there.nvme == away.nvme == 0


@pytest.mark.parametrize(("compute", "each"), [("bf16", 4), ("bf16_pure", 2)])
def test_what_is_gathered_has_an_upper_bound(compute: str, each: int) -> None:
    """DeepSpeed holds 10^9 numbers at once, however large the model."""
    few, many = (on_gpus(job(n, 4096), micro_batch=64, compute=compute) for n in (10, 80))
    assert few.kinds["gathered"] > each * 10**9
    assert many.kinds["parameters"] > 7 * few.kinds["parameters"]
    assert many.kinds["gathered"] == pytest.approx(few.kinds["gathered"], rel=0.01)


def test_nvme_takes_the_states_and_the_host_keeps_buffers() -> None:
    large = job(80, 8192)
    numbers = large.sizes.parameters / 4
    cpu = on_gpus(large, **AWAY)
    swapped = on_gpus(large, offload_optimizer="nvme", offload_parameters="nvme")
    assert swapped.kinds == cpu.kinds
    assert swapped.nvme == pytest.approx(16 * numbers + 4 * (numbers - 10**9))
    assert 0.2 * cpu.host < swapped.host < 0.5 * cpu.host
