"""The layout as a value, the one table, and the nearest that works."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any, get_args

import pytest

from rostra.config import Config
from rostra.layout import (
    AXES,
    KEYS,
    RULES,
    Adapter,
    Layout,
    OptimizerStates,
    Place,
    Quantization,
    Schedule,
    Sharding,
    explain,
    nearest,
    refusals,
)
from support import REPOSITORY

FULL: dict[str, Any] = {"sharding": "full_shard", "shard": 2}
BUBBLE: dict[str, Any] = {"pipeline": 2, "pipeline_schedule": "zero_bubble"}
DEEP: dict[str, Any] = {"engine": "deepspeed"}

# For each row: what it refuses, and the nearest that works as a config says it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts stay whole": ({"expert": 2}, "parallel.replicate: 2, parallel.expert: 1"),
    "replicas hold everything": ({"shard": 2}, "parallel.sharding: full_shard"),
    "hybrid needs a group": (
        {"sharding": "hybrid_shard", "replicate": 2},
        "parallel.sharding: no_shard",
    ),
    "only hybrid replicates shards": (
        {**FULL, "replicate": 2},
        "parallel.sharding: hybrid_shard",
    ),
    "zero1 cuts whole parameters": (
        {"sharding": "zero1", "shard": 2, "tensor": 2},
        "parallel.sharding: full_shard",
    ),
    "a schedule for stages": ({"pipeline": 2}, "parallel.schedule: 1f1b"),
    "several stages a rank": (
        {"pipeline": 2, "pipeline_schedule": "gpipe", "stages": 2},
        "parallel.schedule: interleaved_1f1b",
    ),
    "interleaving needs stages": (
        {"pipeline": 2, "pipeline_schedule": "interleaved_1f1b"},
        "parallel.schedule: 1f1b",
    ),
    "zero bubble without tensor": ({**BUBBLE, "tensor": 2}, "parallel.schedule: 1f1b"),
    "zero bubble uncompiled": ({**BUBBLE, "compile": True}, "parallel.schedule: 1f1b"),
    "zero bubble recomputes whole modules": (
        {**BUBBLE, "activation_checkpointing": "selective:operations"},
        "parallel.schedule: 1f1b",
    ),
    "known checkpointing": (
        {"activation_checkpointing": "every:0"},
        "memory.activation_checkpointing: full",
    ),
    "NVMe is DeepSpeed's": ({"offload_optimizer": "nvme"}, "memory.offload.optimizer: cpu"),
    "offloaded parameters are sharded": (
        {"replicate": 2, "offload_parameters": "cpu", "offload_optimizer": "cpu"},
        "memory.offload.parameters: none",
    ),
    "offloaded parameters take the optimizer along": (
        {**FULL, "offload_parameters": "cpu"},
        "memory.offload.optimizer: cpu",
    ),
    "bf16_pure keeps whole parameters": (
        {**FULL, "compute": "bf16_pure"},
        "precision.compute: bf16",
    ),
    "backward updates cannot wait": (
        {"optimizer_in_backward": True, "accumulation": 4},
        "train.micro_batch_size: 8",
    ),
    "backward updates cannot be taken back": (
        {"optimizer_in_backward": True, "compute": "fp16"},
        "precision.compute: bf16",
    ),
    "backward updates are local": (
        {"optimizer_in_backward": True, "replicate": 2},
        "memory.optimizer_in_backward: false",
    ),
    "backward updates change the model itself": (
        {"optimizer_in_backward": True, "offload_optimizer": "cpu"},
        "memory.optimizer_in_backward: false",
    ),
    "quantised bases are frozen": ({"quantization": "nf4"}, "adapter.kind: lora"),
    "adapters beside whole matrices": (
        {"adapter": "lora", "tensor": 2},
        "parallel.replicate: 2, parallel.tensor: 1",
    ),
    "adapters in float32": (
        {"adapter": "lora", "compute": "bf16_pure"},
        "precision.compute: bf16",
    ),
    "low-bit states are whole or sharded by row": (
        {"sharding": "zero1", "shard": 2, "optimizer_states": "int4"},
        "memory.optimizer_states: fp32",
    ),
    "paged states are CUDA's and whole": (
        {**FULL, "optimizer_states": "paged_int8"},
        "memory.optimizer_states: int8",
    ),
    "DeepSpeed splits data alone": ({**DEEP, "tensor": 2}, "parallel.engine: torch"),
    "DeepSpeed has its stages": (
        {**DEEP, "sharding": "hybrid_shard", "shard": 2},
        "parallel.engine: torch",
    ),
    "DeepSpeed shards over all data ranks": (
        {**DEEP, "sharding": "zero1", "shard": 2, "replicate": 2},
        "parallel.engine: torch",
    ),
    "DeepSpeed keeps masters in partitions": (
        {**DEEP, "compute": "bf16_pure"},
        "precision.compute: bf16",
    ),
    "DeepSpeed offloads all in ZeRO-3": (
        {**DEEP, "sharding": "zero1", "shard": 2, "offload_optimizer": "nvme"},
        "memory.offload.optimizer: cpu",
    ),
    "DeepSpeed without fp8": ({**DEEP, "compute": "fp8"}, "precision.compute: bf16"),
    "DeepSpeed reduces in float32": ({**DEEP, "reduction": "bf16"}, "precision.reduction: fp32"),
    "DeepSpeed's optimizer is its own": ({**DEEP, "compile": True}, "train.compile: false"),
}


# Near to what is refused, and seen to compute what one process computes.
WORKS: tuple[dict[str, Any], ...] = (
    {**BUBBLE, "context": 2},
    {**BUBBLE, **FULL},
    {**BUBBLE, "stages": 2, "activation_checkpointing": "full"},
    {**BUBBLE, "stages": 2, "activation_checkpointing": "selective:mlp"},
    {"pipeline": 2, "pipeline_schedule": "interleaved_1f1b", "stages": 2, "tensor": 2},
    {"pipeline": 2, "pipeline_schedule": "1f1b", "compile": True},
    {"tensor": 2, "compile": True},
    {"sharding": "zero1", "shard": 2, "replicate": 2},
    {"sharding": "zero1", "shard": 2, "context": 2},
    {"sharding": "zero1", "shard": 2, "compute": "bf16_pure"},
    {"context": 2, "compute": "bf16_pure"},
    {"sharding": "hybrid_shard", "replicate": 2, "context": 2},
    {**FULL, "tensor": 2, "offload_parameters": "cpu", "offload_optimizer": "cpu"},
    {**FULL, "optimizer_states": "int8"},
    {"pipeline": 2, "pipeline_schedule": "1f1b", "optimizer_states": "int8"},
    {"optimizer_in_backward": True, "activation_checkpointing": "full"},
    {**DEEP, **FULL, "compute": "bf16_pure"},
    {**DEEP, **FULL, "activation_checkpointing": "selective:operations"},
    {**DEEP, **FULL, "offload_parameters": "cpu"},
)


def layout_of(**changes: Any) -> Layout:
    return Layout(**{"micro_batch": 2, "accumulation": 1, **changes})


def random_layouts(count: int) -> list[Layout]:
    choose = random.Random(0)
    values: dict[str, tuple[Any, ...]] = {
        "micro_batch": (1, 2),
        "accumulation": (1, 2),
        "engine": ("torch", "torch", "deepspeed"),
        **dict.fromkeys(AXES, (1, 1, 1, 2)),
        "sharding": get_args(Sharding),
        "pipeline_schedule": get_args(Schedule),
        "stages": (1, 2),
        "activation_checkpointing": ("none", "full", "selective:operations", "some"),
        "offload_parameters": get_args(Place),
        "offload_optimizer": get_args(Place),
        "compute": ("fp32", "bf16", "fp16", "bf16_pure", "fp8"),
        "reduction": ("fp32", "bf16"),
        "quantization": get_args(Quantization),
        "adapter": get_args(Adapter),
        "optimizer_states": get_args(OptimizerStates),
        "optimizer_in_backward": (False, True),
        "compile": (False, True),
    }
    return [
        Layout(**{name: choose.choice(some) for name, some in values.items()}) for _ in range(count)
    ]


class Watched:
    """A layout that notes which of its fields are looked at."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.seen = layout, set[str]()

    def __getattr__(self, name: str) -> Any:
        names = {"world_size": AXES, "data": ("replicate", "shard")}
        self.seen |= set(names.get(name, (name,)))
        return getattr(self.layout, name)


def test_a_layout_survives_being_written_down() -> None:
    layout = Layout(micro_batch=4, accumulation=2, compute="bf16", compile=True)
    assert Layout.from_dict(layout.to_dict()) == layout
    assert hash(Layout.from_dict(layout.to_dict())) == hash(layout)
    with pytest.raises(ValueError, match="tensors"):
        Layout.from_dict({**layout.to_dict(), "tensors": 2})


def test_world_size_is_the_product_of_the_axes() -> None:
    assert Layout(1, 1, replicate=2, shard=3, tensor=5).world_size == 30


def test_keys_are_those_of_a_config() -> None:
    assert set(KEYS) == {f.name for f in fields(Layout)} - {"accumulation"}
    schema = Config.model_json_schema()
    for key in KEYS.values():
        table: Any = schema
        for part in key.split("."):
            options = [table, *table.get("anyOf", [])]
            tables = [schema["$defs"][o["$ref"].split("/")[-1]] for o in options if "$ref" in o]
            (table,) = (t["properties"][part] for t in [*tables, table] if "properties" in t)


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_refuses_and_the_nearest_works(name: str) -> None:
    changes, works = REFUSED[name]
    layout = layout_of(**changes)
    (rule,) = refusals(layout)
    assert rule.name == name
    said, last = explain(layout).splitlines()
    assert last == f"the nearest layout that works: {works}"
    for field, value in changes.items():
        if field in rule.fields:
            assert f"{KEYS.get(field, field)} = {str(value).replace('True', 'true')}" in said


@pytest.mark.parametrize("changes", WORKS, ids=str)
def test_what_works_is_not_refused(changes: dict[str, Any]) -> None:
    assert [rule.name for rule in refusals(layout_of(**changes))] == []


def test_every_row_is_tried() -> None:
    assert [rule.name for rule in RULES] == ["positive sizes", *REFUSED]


@pytest.mark.parametrize("field", ["micro_batch", "accumulation", "stages", *AXES])
def test_sizes_are_positive(field: str) -> None:
    layout = layout_of(**{field: 0})
    assert "positive sizes" in [rule.name for rule in refusals(layout)]
    assert f"{KEYS.get(field, field)} = 0" in explain(layout)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_row_names_the_fields_it_looks_at(rule: Any) -> None:
    seen: set[str] = set()
    for layout in random_layouts(2000):
        watched = Watched(layout)
        rule.refuses(watched)
        seen |= watched.seen
    assert seen == set(rule.fields)


def test_the_nearest_is_legal_and_as_large() -> None:
    for layout in random_layouts(30):
        other = nearest(layout)
        if other is not None:
            assert not refusals(other)
            assert other.world_size == layout.world_size
            samples = layout.micro_batch * layout.accumulation
            assert other.micro_batch * other.accumulation == samples
        if not refusals(layout):
            assert other == layout
            assert explain(layout) == ""


def test_the_nearest_changes_few_keys_and_keeps_the_axes() -> None:
    one = layout_of(**DEEP, compute="bf16_pure", offload_optimizer="cpu")  # not both of these
    assert explain(one).endswith("works: parallel.engine: torch")
    fewer = layout_of(**FULL, pipeline_schedule="1f1b", stages=2)  # than a pipeline of 2 ranks
    assert explain(fewer).endswith(": parallel.schedule: null, parallel.stages: 1")
    host = {"offload_parameters": "cpu", "offload_optimizer": "cpu"}
    kept = nearest(layout_of(sharding="hybrid_shard", replicate=2, **host))  # not shard: 2
    assert kept == layout_of(replicate=2, offload_optimizer="cpu")


def test_a_row_is_told_for_each_that_refuses() -> None:
    layout = layout_of(**BUBBLE, tensor=2, compile=True, stages=2)
    said = explain(layout)
    first, second, last = said.splitlines()
    assert "parallel.schedule = zero_bubble, parallel.tensor = 2: " in first
    assert "parallel.schedule = zero_bubble, train.compile = true: " in second
    assert last == "the nearest layout that works: parallel.schedule: interleaved_1f1b"


def table() -> str:
    """The rows as `docs/layouts.md` shows them."""
    rows = [
        f"| {rule.name} | {', '.join(f'`{KEYS.get(f, f)}`' for f in rule.fields)} | {rule.reason} |"
        for rule in RULES
    ]
    return "\n".join(
        ["| row | looks at | why it refuses, and what works |", "|---|---|---|", *rows]
    )


def test_the_page_has_the_table() -> None:
    page = (REPOSITORY / "docs" / "layouts.md").read_text()
    assert table() in page
    for key in KEYS.values():
        assert f"`{key}`" in page


def test_a_line_tells_all_that_is_not_plain() -> None:
    assert Layout(4, 1).describe() == "one process"
    layout = Layout(4, 1, shard=2, sharding="full_shard", compute="bf16", compile=True)
    assert layout.describe() == "shard=2, sharding=full_shard, compute=bf16, compile"
