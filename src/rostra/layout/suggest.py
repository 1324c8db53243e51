"""For a layout that the table refuses: the nearest that it does not, and how to say it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import reduce
from itertools import combinations, permutations
from operator import or_
from typing import Any

from rostra.layout.rules import refusals
from rostra.layout.value import AXES, Layout

# What a field may become instead, the dearest last.
CHOICES: dict[str, tuple[Any, ...]] = {
    "pipeline_schedule": ("1f1b", "interleaved_1f1b", "gpipe", "none"),
    "stages": (1, 2),
    "activation_checkpointing": ("full", "none"),
    "compute": ("bf16", "fp32"),
    "reduction": ("fp32",),
    "adapter": ("lora",),
    "quantization": ("none",),
    "optimizer_states": ("int8", "fp32"),
    "optimizer_in_backward": (False,),
    "compile": (False,),
    "offload_optimizer": ("cpu", "none"),
    "offload_parameters": ("cpu", "none"),
    "engine": ("torch", "deepspeed"),
    "sharding": ("full_shard", "hybrid_shard", "no_shard", "zero1", "shard_grad_op"),
}

Change = dict[str, Any]


def nearest(layout: Layout) -> Layout | None:
    """The legal layout of the same world size that differs in the fewest keys of a config;
    among these one that keeps the axes, then the sharding, then the engine. `layout` itself when
    it is legal; None when three changes are not enough."""
    if not refusals(layout):
        return layout
    changes = list(_changes(layout))
    for counts in ((1, 2), (3,)):
        found = [legal for count in counts for legal in _legal(layout, changes, count)]
        if found:
            return min(found, key=lambda other: _distance(layout, other))
    return None


def explain(layout: Layout) -> str:
    """Why the table refuses `layout`, a row a line, and the nearest that works, as a config
    says it. Empty when it is legal."""
    lines = [rule(layout) for rule in refusals(layout)]
    other = nearest(layout) if lines else None
    if other is not None:
        changed = other.in_config(_changed(layout, other), sign=": ")
        lines.append(f"the nearest layout that works: {changed}")
    return "\n".join(lines)


def _changes(layout: Layout) -> Iterator[Change]:
    """Each that changes one thing: a field, the micro batch, or the axis that has some ranks."""
    yield {"micro_batch": layout.micro_batch * layout.accumulation, "accumulation": 1}
    for name, values in CHOICES.items():
        for value in values:
            if value != getattr(layout, name):
                yield {name: value}
    for one, other in permutations(AXES, 2):
        ranks = getattr(layout, one)
        if ranks > 1:
            yield {one: 1, other: ranks * getattr(layout, other)}


def _legal(layout: Layout, changes: list[Change], count: int) -> Iterator[Layout]:
    for chosen in combinations(changes, count):
        merged: Change = reduce(or_, chosen)
        other = replace(layout, **merged)
        if other.world_size == layout.world_size and not refusals(other):
            yield other


def _distance(layout: Layout, other: Layout) -> tuple[int, ...]:
    changed = _changed(layout, other)
    kept = (set(AXES), {"sharding"}, {"engine"})
    return len(changed), *(len(names & set(changed)) for names in kept)


def _changed(layout: Layout, other: Layout) -> list[str]:
    """Fields that differ and have a key: the micro batches of a step follow from the others."""
    names = [f.name for f in fields(layout) if f.name != "accumulation"]
    return [name for name in names if getattr(layout, name) != getattr(other, name)]
