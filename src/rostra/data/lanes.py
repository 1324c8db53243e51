"""The lanes of streamed sources: what each has of every stream, and whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rostra.data.permutation import derive
from rostra.data.streams import Cursor, Tape

_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio

Cursors = tuple[Cursor, ...]  # one a stream


class Turns:
    """Which source each sample of a lane is of, by weights, at any place without counting.

    The golden ratio's multiples, from a random start for each lane, are spread over the unit
    interval as evenly as any sequence is (Weyl, 1916); each source has its share of that.
    """

    def __init__(self, weights: Sequence[float], lanes: int, seed: int) -> None:
        total = sum(weights)
        bounds = [int(sum(weights[:k]) / total * _WORD) for k in range(1, len(weights))]
        self._bounds = np.array([min(bound, _WORD - 1) for bound in bounds], np.uint64)
        self._starts = np.array([derive(seed, "lane", k) for k in range(lanes)], np.uint64)

    def at(self, sample: int) -> NDArray[np.int64]:
        """The source of each lane's sample with this number: [lanes]."""
        return self._of(self._starts, sample)

    def one(self, sample: int, lane: int) -> int:
        """The same of one lane."""
        return int(self._of(self._starts[lane : lane + 1], sample)[0])

    def _of(self, starts: NDArray[np.uint64], sample: int) -> NDArray[np.int64]:
        words = starts + np.uint64(sample * _GOLDEN % _WORD)
        return np.searchsorted(self._bounds, words, side="right")


class Lane:
    """One row of the global batch: a tape of each stream, and the cursors of earlier samples."""

    def __init__(self, tapes: list[Tape], sample: int) -> None:
        self.tapes = tapes
        self.next = sample  # the number of its next sample
        self.kept: dict[int, Cursors] = {}

    @property
    def cursors(self) -> Cursors:
        return tuple(tape.cursor for tape in self.tapes)

    def seek(self, sample: int) -> None:
        """Go back, if it is beyond a sample, to where it comes from."""
        if sample >= self.next:
            return
        found = max((n for n in self.kept if n <= sample), default=0)
        cursors = self.kept.get(found, (Cursor(),) * len(self.tapes))
        for tape, cursor in zip(self.tapes, cursors, strict=True):
            tape.restart(cursor)
        self.next = found

    def forget(self, sample: int) -> None:
        """Keep no cursors of samples before this one."""
        self.kept = {n: cursors for n, cursors in self.kept.items() if n >= sample}
