"""Which of the layouts that a search has found a plan takes.

The best by its own figures is seldom it: the models err by some per cent, and within that a
layout with tensor parallelism or offloading is no better than a plain one. So each part that a
layout has beside plain data parallelism has to earn its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2

from rostra.plan.search import Entry, Goal

ABOUT = 1.03  # times as much is about the same


def choose(entries: Iterable[Entry], goal: Goal) -> Entry | None:
    """The best of `entries` by `goal`, where each part (`rostra.plan.search.parts_of`) has to
    gain 3%, and so has each doubling of devices (`fastest`) or of time (`cheapest`). `fewest` are
    the fewest devices, and of the layouts on so many that of `fastest`.

    Of so many devices and parts the fastest is always the best: those of each
    (`Found.bests`) are enough to be exact.
    """
    left = list(entries)
    if goal == "fewest" and left:
        least = min(x.ranks for x in left)
        left = [x for x in left if x.ranks == least]
    return min(left, key=lambda x: (_cost(x, goal), x.by(goal)), default=None)


def _cost(x: Entry, goal: Goal) -> float:
    if goal == "cheapest":
        return float(x.seconds * x.ranks * ABOUT ** (x.parts + log2(x.seconds)))
    return float(x.seconds * ABOUT ** (x.parts + log2(x.ranks)))


def about_beats(one: tuple[float, int, int], other: tuple[float, int, int]) -> bool:
    """Whether `one` (seconds of a step, devices, bytes of a device) is about as good as `other`
    in each and in price, or better."""
    price = one[0] * one[1] <= ABOUT * other[0] * other[1]
    return price and all(a <= ABOUT * b for a, b in zip(one, other, strict=True))
