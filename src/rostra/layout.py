"""How a model and its work lie over devices: one frozen value, and the one table of what
may be combined with what.

The planner proposes a `Layout`, the engine executes it, checkpoints and reports carry it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any, Literal, Self

AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert")

Compute = Literal["fp32", "bf16", "fp16", "bf16_pure"]


@dataclass(frozen=True)
class Layout:
    """All that decides memory and time of a step; equal layouts cost the same."""

    micro_batch: int  # samples a rank computes at once
    accumulation: int  # micro batches of a rank in one optimizer step
    engine: Literal["torch"] = "torch"
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sharding: Literal["no_shard"] = "no_shard"
    pipeline_schedule: Literal["none"] = "none"
    activation_checkpointing: Literal["none"] = "none"
    offload: Literal["none"] = "none"
    compute: Compute = "fp32"
    reduction: Literal["fp32"] = "fp32"
    quantization: Literal["none"] = "none"
    adapter: Literal["none"] = "none"
    optimizer_states: Literal["fp32"] = "fp32"
    compile: bool = False

    @property
    def world_size(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"not a key of a layout: {', '.join(unknown)}")
        return cls(**values)


@dataclass(frozen=True)
class Rule:
    """A row of the table: which layouts it refuses, and why."""

    name: str
    refuses: Callable[[Layout], bool]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        "positive sizes",
        lambda x: min(x.micro_batch, x.accumulation, *(getattr(x, a) for a in AXES)) < 1,
        "every size of a layout is at least 1",
    ),
    *(
        Rule(
            f"one {axis}",
            lambda x, axis=axis: getattr(x, axis) > 1,  # type: ignore[misc]
            f"this version trains in one process; set parallel.{axis} to 1",
        )
        for axis in AXES
    ),
)


def refusals(layout: Layout) -> list[Rule]:
    """The rows of the table that refuse `layout`; none when it is legal."""
    return [rule for rule in RULES if rule.refuses(layout)]
