"""The order of an epoch's samples: over all of them, within windows, or as they were read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from rostra.config.loading import LoadTable
from rostra.data.permutation import Permutation, derive

Ints = NDArray[np.int64]


class Order(Protocol):
    """A bijection of range(size): from a sample's number in an epoch to its place."""

    @overload
    def __call__(self, index: int) -> int: ...
    @overload
    def __call__(self, index: Ints) -> Ints: ...


@dataclass(frozen=True)
class AsRead:
    """Samples in the order in which they lie in the shards."""

    @overload
    def __call__(self, index: int) -> int: ...
    @overload
    def __call__(self, index: Ints) -> Ints: ...

    def __call__(self, index: int | Ints) -> int | Ints:
        return index


@dataclass(frozen=True)
class WindowOrder:
    """Blocks of neighbouring samples in random order, shuffled within windows.

    An epoch begins at a random sample and goes round. Its whole blocks (of `block` samples)
    come in the order of a keyed permutation, what is left over comes last; of the run that this
    gives, every `window` samples are shuffled by a permutation of their own. So the samples of
    a window lie in `window / block + 2` blocks at the most, and any place is found in O(1).
    """

    seed: int
    epoch: int
    size: int
    block: int
    window: int

    @cached_property
    def _blocks(self) -> Permutation:
        return Permutation(derive(self.seed, "blocks"), self.epoch, self.size // self.block)

    @cached_property
    def _first(self) -> int:
        return derive(self.seed, "first", self.epoch) % self.size

    @overload
    def __call__(self, index: int) -> int: ...
    @overload
    def __call__(self, index: Ints) -> Ints: ...

    def __call__(self, index: int | Ints) -> int | Ints:
        """Where `index` goes; an array goes element by element.

        Raises:
            IndexError: when an index is outside range(size).
        """
        given = np.atleast_1d(np.asarray(index, dtype=np.int64))
        if given.size and (given.min() < 0 or given.max() >= self.size):
            raise IndexError(f"outside range({self.size})")
        places = np.empty_like(given)
        windows = given // self.window
        for number in np.unique(windows).tolist():
            here = windows == number
            first = number * self.window
            shuffled = Permutation(
                derive(self.seed, "window", number),
                self.epoch,
                min(self.window, self.size - first),
            )
            places[here] = first + shuffled(given[here] - first)
        whole = places < self.size // self.block * self.block
        blocks, within = np.divmod(places[whole], self.block)
        places[whole] = self._blocks(blocks) * self.block + within
        places = (places + self._first) % self.size
        return places if isinstance(index, np.ndarray) else int(places[0])


def epoch_order(load: LoadTable, seed: int, epoch: int, size: int, blocks: int) -> Order:
    """The order of an epoch of `size` samples that lie in about `blocks` shards."""
    if load.shuffle == "none":
        return AsRead()
    if load.shuffle == "global" or not size:
        return Permutation(seed, epoch, size)
    return WindowOrder(seed, epoch, size, max(1, size // max(1, blocks)), load.window)
