"""Bytes that grow with the micro batch, as complex numbers: `a + bj` are a bytes, and b more for
each of its tokens on this rank.

A layer's operations are the same whatever the micro batch, so their sizes are straight lines over
its tokens, and a peak is the highest of some lines. One tape, and one look at the moments of a
step, tell of all micro batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import TypeVar

Item = TypeVar("Item")

TOKENS = 1j  # of a micro batch: what is computed from them are lines


def at(size: complex, tokens: int) -> float:
    """`size` for a micro batch of so many tokens."""
    return size.real + size.imag * tokens


def highest(sizes: Iterable[complex]) -> tuple[complex, ...]:
    """Those of `sizes` of which one is the largest, whatever the tokens."""
    found = sorted(set(sizes), key=lambda size: (-size.real, -size.imag))
    return tuple(found[i] for i in _steeper(found))


def highest_of(items: Sequence[Item], sizes: Sequence[complex]) -> list[Item]:
    """Those of `items` of whose `sizes` one is the largest, whatever the tokens, in their order;
    of equals the first."""
    falling = sorted(range(len(items)), key=lambda i: (-sizes[i].real, -sizes[i].imag, i))
    kept = _steeper([sizes[i] for i in falling])
    return [items[i] for i in sorted(falling[k] for k in kept)]


def _steeper(falling: Iterable[complex]) -> Iterator[int]:
    """Places of those that grow faster than all before them, which are more at the start."""
    steepest = -inf
    for place, size in enumerate(falling):
        if size.imag > steepest:
            steepest = size.imag
            yield place
