"""Samples of documents that run on: tokens across shards, cut at every `sequence_length`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from rostra.batch import IGNORE, Batch
from rostra.config.loading import LoadTable
from rostra.data.order import Order, epoch_order
from rostra.data.shards import Shard, Shards

Ints = NDArray[np.int64]


class Samples:
    """The training documents' tokens, run on across shards and cut into samples.

    Sample g of an epoch has the tokens `[i * T, (i + 1) * T)` of the run, T being
    `sequence_length` and i = order(epoch)(g), and as labels the tokens one further. What is
    left at the end of the run, less than a sample, is not used.

    With `isolate_documents` a position whose next token begins another document is no target,
    and position_ids start again at 0 with every document, also with one that began in the
    sample before.
    """

    def __init__(
        self,
        shards: Shards,
        sequence_length: int,
        seed: int,
        isolate_documents: bool,
        load: LoadTable | None = None,
    ) -> None:
        """`load` says how samples are shuffled; over all of an epoch when not given."""
        self.shards = shards
        self.sequence_length = sequence_length
        self.seed = seed
        self.isolate_documents = isolate_documents
        self.load = load or LoadTable()

    def __len__(self) -> int:
        """Samples in an epoch."""
        return max(0, (self.shards.tokens - 1) // self.sequence_length)

    @property
    def tokens(self) -> int:
        """Positions in an epoch."""
        return len(self) * self.sequence_length

    def order(self, epoch: int) -> Order:
        """From a sample's number in the epoch to its index."""
        return epoch_order(self.load, self.seed, epoch, len(self), len(self.shards))

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """The samples at these places of the run."""
        length = self.sequence_length
        arrays = np.empty((3, len(indices), length), dtype=np.int64)
        inputs, labels, positions = arrays
        positions[:] = count = np.arange(length)
        for row, index in enumerate(indices.tolist()):
            begins = self._cut(index * length, inputs[row], labels[row])
            if self.isolate_documents:
                for begin in begins:
                    positions[row, begin:] = count[: length - begin]
                    if begin:
                        labels[row, begin - 1] = IGNORE
        return Batch(*torch.from_numpy(arrays))

    def document_ids(self, index: int) -> tuple[str, ...]:
        """The documents that the inputs of the sample at this place come from."""
        ids: list[str] = []
        first = index * self.sequence_length

        def collect(shard: Shard, start: int, stop: int, _: int) -> None:
            low = int(np.searchsorted(shard.offsets, start, "right")) - 1
            high = int(np.searchsorted(shard.offsets, stop, "left"))
            ids.extend(shard.id(document) for document in range(low, high))

        self._walk(first, first + self.sequence_length, collect)
        return tuple(ids)

    def _cut(self, first: int, inputs: Ints, labels: Ints) -> list[int]:
        """Fill in the tokens from `first` on, and those one further; where documents begin."""
        length = len(inputs)
        begins: list[int] = []

        def copy(shard: Shard, start: int, stop: int, at: int) -> None:
            found = shard.tokens[start:stop]
            inputs[at : at + len(found)] = found[: length - at]
            labels[max(0, at - 1) : at - 1 + len(found)] = found[at == 0 :]
            low, high = shard.offsets.searchsorted((start, stop))
            if low < high:
                begins.extend((shard.offsets[low:high] - (start - at)).tolist())

        self._walk(first, first + length + 1, copy)
        return begins

    def _walk(self, first: int, end: int, visit: Callable[[Shard, int, int, int], None]) -> None:
        """Visit the run's tokens [first, end) shard by shard: (shard, start, stop, place)."""
        starts = self.shards.starts
        number = int(starts.searchsorted(first, "right")) - 1
        at = first
        while at < end:
            base = int(starts[number])
            stop = min(end, int(starts[number + 1]))
            visit(self.shards[number], at - base, stop - base, at - first)
            at = stop
            number += 1
