"""What traces teach a plan: of compiled layouts, of what they refute, of what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from transformers import AutoConfig

from rostra.config import config_from_dict
from rostra.hardware import Cluster, read_cluster
from rostra.layout import Layout
from rostra.plan.explain import explain
from rostra.plan.job import Job, job_of
from rostra.plan.memory import MemoryModel
from rostra.plan.planner import make_plan, room_of
from rostra.plan.scaled import ScaledMemory
from rostra.plan.search import Entry, Miss
from rostra.plan.shortage import shortage_told
from rostra.plan.trace import traced
from rostra.plan.traces import MOST, Traces
from rostra.plan.words import counts

PHI = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512,
    "intermediate_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip
DROPS = {
    "n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 512, "n_positions": 512,
    "resid_pdrop": 0.5,
}  # fmt: skip
COMPUTE = {"phi": "bf16", "gpt2": "fp32"}  # where formulas say less than a trace
FIXED = {
    "train": {"micro_batch_size": 8, "compile": False},
    "memory": {
        "activation_checkpointing": "none",
        "offload": {"optimizer": "none", "parameters": "none"},
    },
    "parallel": {"replicate": 1},
}


def job(family: str, **sections: dict[str, object]) -> Job:
    values = {
        "model": {"pretrained": "unused"},
        "data": {"sources": [{"type": "completion", "path": "x"}], "sequence_length": 512},
        "precision": {"compute": COMPUTE[family]},
        **sections,
    }
    values["train"] = {"steps": 2, "global_batch_size": 8, **sections.get("train", {})}
    shape = AutoConfig.for_model(family, **(PHI if family == "phi" else DROPS))
    return job_of(config_from_dict(values), shape)


def cluster_of(memory: int) -> Cluster:
    """A GPU with so much memory to fill."""
    cluster = read_cluster("1xH100")
    device = replace(cluster.device, memory_bytes=memory)
    device = replace(device, memory_bytes=memory + memory - room_of(_with(cluster, device)).device)
    return _with(cluster, device)


def _with(cluster: Cluster, device: object) -> Cluster:
    return replace(cluster, node=replace(cluster.node, device=device))


def between(asked: Job, layout: Layout) -> Cluster:
    """With room for what the formulas say of `layout`, and none for what its trace says."""
    large = read_cluster("1xH100")
    memory = MemoryModel(asked, large)
    formula, trace = memory(layout), ScaledMemory(memory).keep(layout, traced(asked, layout, large))
    assert trace.total > formula.total
    return cluster_of((formula.total + trace.total) // 2)


LAYOUT = Layout(8, 1, compute="bf16")


def test_a_compiled_layout_is_scaled_as_its_twin_was_traced() -> None:
    phi = job("phi", train={"compile": True})
    plan = make_plan(phi, read_cluster("1xH100"), trace="always")
    assert plan.chosen is not None
    assert plan.chosen.layout.compile
    assert plan.chosen.memory.source == "scaled"
    bare = MemoryModel(phi, plan.cluster)(plan.chosen.layout)
    assert plan.chosen.memory.total > 1.05 * bare.total
    assert "scaled as traces" in counts(plan)


@pytest.mark.parametrize("family", ["gpt2", "phi"])
def test_what_a_trace_refutes_does_not_fit(family: str) -> None:
    asked = job(family, **FIXED)
    cluster = between(asked, replace(LAYOUT, compute=COMPUTE[family]))
    assert make_plan(asked, cluster).feasible
    plan = make_plan(asked, cluster, trace="always")
    assert not plan.feasible
    assert "as its trace shows" in shortage_told(plan)
    told = plan.to_dict()
    assert (told["fitting"], told["fastest"], told["front"]) == (0, None, [])
    assert all(isinstance(x, Miss) for x in plan.found.kinds.values())


def test_a_way_to_fit_knows_what_traces_taught() -> None:
    asked = job("phi", **FIXED)
    cluster = between(asked, LAYOUT)
    ways = explain(make_plan(asked, cluster, trace="always")).ways
    assert ways
    for way in ways:
        assert way.candidate.memory.source != "linears"
        assert not room_of(way.cluster).shortage(way.candidate.memory, 1)
        same = way.candidate.layout == LAYOUT and way.cluster == cluster
        assert not same or {x.name for x in way.changes} - {"auto"}


def test_training_traces_only_what_is_in_doubt() -> None:
    asked = job("phi", **FIXED)
    assert make_plan(asked, read_cluster("1xH100"), trace="in doubt").traces == Traces("in doubt")
    assert not make_plan(asked, between(asked, LAYOUT), trace="in doubt").feasible


def test_what_no_trace_sees_is_left_to_formulas_of_known_families() -> None:
    layouts = [
        replace(LAYOUT, compile=True),
        replace(LAYOUT, activation_checkpointing="offload"),
    ]
    cluster = read_cluster("1xH100")
    for family, possible in (("gpt2", False), ("phi", True)):
        memory = ScaledMemory(MemoryModel(job(family), cluster))
        for layout in layouts:
            assert Traces().possible(Entry(1.0, 1, 1, layout, 0), memory) is possible
            assert memory.twin(layout) in (LAYOUT, replace(LAYOUT, activation_checkpointing="full"))


def test_a_failed_trace_says_why_and_another_strategy_is_traced(
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked, cluster = job("phi", train={"compile": False}), read_cluster("4xH100")
    memory, room, traces = ScaledMemory(MemoryModel(asked, cluster)), room_of(cluster), Traces()
    layout = Layout(2, 4, tensor=3, compute="bf16")  # 4 heads
    entry = Entry(1.0, 1, 3, layout, 0)
    capfd.readouterr()
    assert traces.refutes(entry, asked, cluster, memory, room) is None
    assert capfd.readouterr().err == ""
    why = traces.why_not(layout)
    assert why is not None
    assert "\n" not in why
    assert not traces.possible(entry, memory)
    other = replace(entry, layout=replace(layout, tensor=1, shard=2, sharding="full_shard"))
    assert traces.possible(other, memory)
    assert traces.left == MOST - 1


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_rank_of_a_group_has_its_traces_made_elsewhere(group: None) -> None:
    asked, cluster = job("gpt2", **FIXED), read_cluster("1xH100")
    memory, traces = ScaledMemory(MemoryModel(asked, cluster)), Traces()
    assert (
        traces.refutes(Entry(1.0, 1, 1, LAYOUT, 0), asked, cluster, memory, room_of(cluster))
        is False
    )
    assert memory(LAYOUT).source == "trace"
    assert dist.is_initialized()
