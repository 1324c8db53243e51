"""How a model and its work lie over devices: one frozen value, the one table of what may be
combined with what, and for what is refused the nearest that works.

The planner proposes a `Layout`, the engine executes it, checkpoints and reports carry it.
"""

from __future__ import annotations

from rostra.layout.rules import RULES, Rule, refusals
from rostra.layout.suggest import explain, nearest
from rostra.layout.value import (
    AXES,
    KEYS,
    SHARDED,
    Adapter,
    Compute,
    Layout,
    OptimizerStates,
    Place,
    Quantization,
    Schedule,
    Sharding,
)

__all__ = [
    "AXES",
    "KEYS",
    "RULES",
    "SHARDED",
    "Adapter",
    "Compute",
    "Layout",
    "OptimizerStates",
    "Place",
    "Quantization",
    "Rule",
    "Schedule",
    "Sharding",
    "explain",
    "nearest",
    "refusals",
]
