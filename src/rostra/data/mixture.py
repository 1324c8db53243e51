"""Which source stands at which position of the training: a mixture by weights, computed.

Weights are shares of 65,536: every so many positions hold each source exactly as often as its
share says, spread evenly. Nothing is drawn and nothing stored: what stands at a position
follows from the seed, the weights and the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rostra.data.permutation import derive

Ints = NDArray[np.int64]

BLOCK = 65_536  # positions after which every source was seen exactly by its share


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole shares of `BLOCK`, by largest remainder; what has a weight has a share."""
    exact = np.array(weights, dtype=np.float64) / sum(weights) * BLOCK
    shares = np.maximum(np.floor(exact), np.array(weights) > 0).astype(np.int64)
    order = np.argsort(shares - exact, kind="stable")  # what lacks most comes first
    lacking = BLOCK - int(shares.sum())
    if lacking >= 0:
        shares[order[:lacking]] += 1
    while lacking < 0:  # many tiny weights were rounded up: the largest pays
        shares[np.argmax(shares)] -= 1
        lacking += 1
    return tuple(shares.tolist())


@lru_cache(16)
def spread(shares: tuple[int, ...], key: int) -> NDArray[np.uint16]:
    """The source at each of the `BLOCK` positions of a block; a key gives one spreading.

    The k-th sample of a source with share q is due at (k + u) / q of the block, u in [0, 1)
    being the source's own under this key; the samples stand in the order in which they are
    due. Before any position, source i was seen q_i / BLOCK of the time, give or take less
    than 1 + w_i (K - 2) samples for K >= 2 sources and w_i = q_i / BLOCK.
    """
    due = [
        (np.arange(share) + derive(key, source) / 2**64) / max(1, share)
        for source, share in enumerate(shares)
    ]
    sources = np.repeat(np.arange(len(shares), dtype=np.uint16), shares)
    return sources[np.argsort(np.concatenate(due), kind="stable")]


@dataclass(frozen=True)
class Phase:
    """Positions in which the shares are the same: until a source was seen often enough."""

    start: int  # its first position
    counts: tuple[int, ...]  # samples of each source seen before it
    shares: tuple[int, ...]
    end: int | None = None  # where the next begins; None when nothing ends it


class Mixture:
    """Sources mixed by weights; a position is the number of samples since training began.

    A source whose `limit` of samples is reached is seen no more, and its share goes to the
    others by their weights: another phase, with a block of its own beginning there.
    """

    def __init__(
        self,
        weights: Sequence[float],
        limits: Sequence[int | None],
        seed: int,
        start: int = 0,
        counts: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            weights: of each source, at least 0 and not all 0; they need not add up to anything.
            limits: samples of each source after which it is seen no more; None is no limit.
            start: the position from which these weights hold.
            counts: samples of each source that were seen before it.
        """
        self.weights, self.limits, self.seed = tuple(weights), tuple(limits), seed
        self.phases: list[Phase] = []
        at, seen = start, tuple(counts or [0] * len(self.weights))
        while (phase := self._phase(at, seen)) is not None:
            self.phases.append(phase)
            if phase.end is None:
                break
            at, seen = phase.end, self._counts(phase, phase.end)
        self.start, self.first_counts = start, tuple(counts or [0] * len(self.weights))
        self.end = at if phase is None else None  # the first position without a sample

    @property
    def terms(self) -> list[list[int | None]]:
        """What decides the mixture from its start on: of each source its share and limit."""
        return [list(term) for term in zip(shares_of(self.weights), self.limits, strict=True)]

    def counts(self, position: int) -> tuple[int, ...]:
        """Samples of each source before a position that is not before the start."""
        if not self.phases or position <= self.start:
            return self.first_counts
        return self._counts(self._phase_at(position - 1), position)

    def at(self, first: int, count: int) -> tuple[Ints, Ints]:
        """Of the positions [first, first + count) the source, and which of its samples it is:
        0, 1, 2 and so on for each source, since training began.

        Raises:
            IndexError: beyond the end, or before the start.
        """
        sources, numbers = np.empty((2, count), dtype=np.int64)
        done = 0
        while done < count:
            phase = self._phase_at(first + done)
            block, slot = divmod(first + done - phase.start, BLOCK)
            stop = min(BLOCK, slot + count - done)
            if phase.end is not None:
                stop = min(stop, phase.end - phase.start - block * BLOCK)
            before = self._counts(phase, first + done)
            here = slice(done, done + stop - slot)
            sources[here] = part = self._spread(phase, block)[slot:stop]
            for source in np.unique(part).tolist():
                mine = part == source
                numbers[here][mine] = before[source] + np.arange(np.count_nonzero(mine))
            done = here.stop
        return sources, numbers

    def _phase_at(self, position: int) -> Phase:
        for phase in reversed(self.phases):
            if position >= phase.start and (phase.end is None or position < phase.end):
                return phase
        raise IndexError(f"there is no sample at position {position}")

    def _spread(self, phase: Phase, block: int) -> NDArray[np.uint16]:
        return spread(phase.shares, derive(self.seed, "mixture", phase.start, block))

    def _counts(self, phase: Phase, position: int) -> tuple[int, ...]:
        """Samples of each source before a position of the phase, or before its end."""
        block, slot = divmod(position - phase.start, BLOCK)
        found = np.array(phase.counts) + block * np.array(phase.shares)
        if slot:
            found += np.bincount(self._spread(phase, block)[:slot], minlength=len(found))
        return tuple(found.tolist())

    def _phase(self, start: int, counts: tuple[int, ...]) -> Phase | None:
        """The phase that begins at a position; None when no source is left."""
        left = [
            None if limit is None else max(0, limit - count)
            for limit, count in zip(self.limits, counts, strict=True)
        ]
        weights = [w if more != 0 else 0.0 for w, more in zip(self.weights, left, strict=True)]
        if not any(weights):
            return None
        phase = Phase(start, counts, shares_of(weights))
        # Where the last sample of each source with a limit is: in which block, and which there.
        last = {
            source: divmod(more - 1, share)
            for source, (more, share) in enumerate(zip(left, phase.shares, strict=True))
            if more and share
        }
        if not last:
            return phase
        block = min(block for block, _ in last.values())
        slots = self._spread(phase, block)
        slot = min(
            int(np.flatnonzero(slots == source)[number])
            for source, (which, number) in last.items()
            if which == block
        )
        return Phase(start, counts, phase.shares, start + block * BLOCK + slot + 1)

    def state(self, position: int) -> dict[str, Any]:
        """What a checkpoint keeps: a few integers, from which `resume` goes on."""
        return {
            "start": self.start,
            "counts": list(self.first_counts),
            "seen": list(self.counts(position)),
            "terms": self.terms,
        }

    def resume(self, state: dict[str, Any], position: int) -> Mixture:
        """This mixture as it goes on at a position from a checkpoint's state: the same as
        before if weights and limits are; else from there on with what was seen until then."""
        same = state["terms"] == self.terms
        start, counts = (state["start"], state["counts"]) if same else (position, state["seen"])
        return Mixture(self.weights, self.limits, self.seed, start, counts)
