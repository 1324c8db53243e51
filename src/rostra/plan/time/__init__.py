"""Seconds of a step of any layout on any cluster: a roofline of what each device computes, what
ranks send each other as far as it shows, the pipeline's bubble, offloading, the optimizer.

`docs/plan-time.md` has every constant and where it is from.
"""

from __future__ import annotations

from rostra.plan.conventions import Conventions
from rostra.plan.efficiency import Efficiency, typical
from rostra.plan.time.flops import hardware_flops, model_flops
from rostra.plan.time.model import TimeModel

__all__ = [
    "Conventions",
    "Efficiency",
    "TimeModel",
    "hardware_flops",
    "model_flops",
    "typical",
]
