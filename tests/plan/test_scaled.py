"""Families that no formula knows: a few traces correct what the formulas say of all layouts."""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoConfig

from rostra.config import config_from_dict
from rostra.hardware import read_cluster
from rostra.layout import Layout
from rostra.plan.job import Job, job_of
from rostra.plan.memory import MemoryModel
from rostra.plan.planner import make_plan
from rostra.plan.scaled import ScaledMemory
from rostra.plan.search import Miss
from rostra.plan.trace import traced
from rostra.plan.traces import Traces

PHI = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512,
    "intermediate_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip
CLUSTER = read_cluster("2xH100")


def job(family: str = "phi", **values: object) -> Job:
    config = config_from_dict(
        {
            "model": {"pretrained": "unused"},
            "data": {
                "sources": [{"type": "completion", "path": "unused"}],
                "sequence_length": 512,
            },
            "train": {"steps": 2, "global_batch_size": 8, "compile": False},
            "precision": {"compute": "bf16"},
        }
    )
    return job_of(config, AutoConfig.for_model(family, **{**PHI, **values}))


def layout(samples: int, mode: str = "none", sharding: str = "full_shard") -> Layout:
    return Layout(
        samples, 4 // samples, shard=2, sharding=sharding, compute="bf16",
        activation_checkpointing=mode,
    )  # fmt: skip


def test_what_one_trace_shows_holds_for_other_layouts_of_its_shape() -> None:
    phi = job()
    memory = ScaledMemory(MemoryModel(phi, CLUSTER))
    others = [layout(4), layout(4, sharding="shard_grad_op")]
    exact = [traced(phi, x, CLUSTER).live for x in others]
    before = [abs(memory(x).live / live - 1) for x, live in zip(others, exact, strict=True)]
    assert memory(others[0]).source == "linears"
    assert not memory.known
    assert min(before) > 0.1
    memory.keep(layout(2), traced(phi, layout(2), CLUSTER))
    memory.scale(layout(2))
    after = [abs(memory(x).live / live - 1) for x, live in zip(others, exact, strict=True)]
    assert memory(others[0]).source == "scaled"
    assert max(after) < 0.05


def test_nothing_is_learned_where_a_trace_sees_less_than_there_is() -> None:
    offloaded = Layout(
        2, 2, "deepspeed", shard=2, sharding="full_shard", offload_parameters="nvme",
        offload_optimizer="cpu", compute="bf16",
    )  # fmt: skip
    here = replace(offloaded, offload_parameters="none", offload_optimizer="none")
    memory = ScaledMemory(MemoryModel(job(), CLUSTER))
    possible = [Traces().possible(Miss(0, 0, x, 0), memory) for x in (offloaded, here)]
    assert possible == [False, True]


def test_a_plan_learns_of_unknown_families_alone() -> None:
    known = make_plan(job("llama"), CLUSTER, trace="always")
    assert {x.memory.source for x in known.alternatives} == {"formula"}
    plan = make_plan(job(), CLUSTER, trace="always")
    assert plan.chosen is not None
    assert plan.chosen.memory.source == "trace"
    assert plan.alternatives
    assert {x.memory.source for x in plan.alternatives} == {"scaled"}
    assert {x.memory.source for x in make_plan(job(), CLUSTER).alternatives} == {"linears"}
