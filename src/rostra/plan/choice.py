"""Which of the layouts that a search has found a plan takes.

The best by its own figures is seldom it: the models err by some per cent, and within that a
layout with tensor parallelism or offloading is no better than a plain one. Of those about as good
as the best the plan takes the one with the least to go wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from rostra.plan.search import Entry, Goal

ABOUT = 1.03  # times as much is about the same


def choose(entries: Iterable[Entry], goal: Goal) -> Entry | None:
    """Of `entries` that are about as good as the best by `goal`, the simplest.

    `fastest`: of those about as fast, the fewest devices, then the fewest parts
    (`rostra.plan.search.parts_of`), then the fastest. `cheapest`: of those about as cheap, the
    fewest parts, then the fastest. `fewest`: on the fewest devices, as `fastest`. As each is the
    fastest of its devices and parts, the fastest of each (`Found.bests`) are enough to be exact.
    """
    left = list(entries)
    if not left:
        return None
    if goal == "fewest":
        least = min(x.ranks for x in left)
        left = [x for x in left if x.ranks == least]
    if goal == "cheapest":
        most = ABOUT * min(x.seconds * x.ranks for x in left)
        near = (x for x in left if x.seconds * x.ranks <= most)
        return min(near, key=lambda x: (x.parts, x.seconds, x.ranks))
    most = ABOUT * min(x.seconds for x in left)
    near = (x for x in left if x.seconds <= most)
    return min(near, key=lambda x: (x.ranks, x.parts, x.seconds))


def about_beats(one: tuple[float, int, int], other: tuple[float, int, int]) -> bool:
    """Whether `one` (seconds of a step, devices, bytes of a device) is about as good as `other`
    in each and in price, or better."""
    price = one[0] * one[1] <= ABOUT * other[0] * other[1]
    return price and all(a <= ABOUT * b for a, b in zip(one, other, strict=True))
