"""The learning rate over a run: a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from rostra.config.schema import ScheduleSection

Schedule = Callable[[int], float]


def steps_of(value: int | str, total: int) -> int:
    """A number of steps, given as such or as a share of `total` such as "3%"."""
    if isinstance(value, int):
        return min(value, total)
    return round(total * float(value.rstrip("%")) / 100)


def make_schedule(section: ScheduleSection, total: int) -> Schedule:
    """The share of the optimizer's learning rate at step s = 0 … total - 1.

    Warm-up is linear, from 1/warmup at the first step to 1. What follows reaches
    `final_fraction` at the last step: `linear`; `cosine`, half a period (Loshchilov and
    Hutter, 2017, arXiv:1608.03983); `wsd`, constant and then half a cosine over the last
    `decay` steps (warmup-stable-decay: Hu et al., 2024, arXiv:2404.06395); or stays at 1.
    """
    warmup = steps_of(section.warmup, total)
    final = section.final_fraction

    def cosine(progress: float) -> float:
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    def after(step: int) -> float:
        start = warmup
        if section.name == "wsd":
            start = max(warmup, total - max(1, steps_of(section.decay, total)))
        if section.name == "constant" or step < start:
            return 1.0
        progress = min(1.0, (step - start + 1) / max(1, total - start))
        return 1 - (1 - final) * progress if section.name == "linear" else cosine(progress)

    return lambda step: (step + 1) / warmup if step < warmup else after(step)
