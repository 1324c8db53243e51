"""Samples of whole documents or examples: several fitted into a row, or one a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray

from rostra.batch import IGNORE, Batch
from rostra.config.loading import LoadTable
from rostra.data.order import Order, epoch_order
from rostra.data.permutation import Permutation
from rostra.data.rows import Cut, Ints, LongExamples, Pieces
from rostra.data.shards import Shard, Shards

WIDTH = 8  # rows of a batch are as wide as its longest, rounded up to a multiple of this


class GroupedOrder:
    """An epoch's order in which the samples of a step are of about one length.

    Samples are shuffled, sorted by length (in units of `WIDTH`) and dealt out in steps of
    `size`, which come in random order. As the samples of all epochs follow on each other, an
    epoch may begin and end within a step; what falls there is the shortest.
    """

    def __init__(self, lengths: Ints, seed: int, epoch: int, size: int) -> None:
        count = len(lengths)
        shuffled = Permutation(seed, epoch, count)(np.arange(count))
        units = -(-lengths[shuffled] // WIDTH)
        by_length = shuffled[np.argsort(units, kind="stable")]
        head = min(-epoch * count % size, count)
        loose = head + (count - head) % size
        steps = by_length[loose:].reshape(-1, size)
        steps = steps[Permutation(seed, epoch, len(steps))(np.arange(len(steps)))]
        self._places = np.concatenate([by_length[:head], steps.ravel(), by_length[head:loose]])

    @overload
    def __call__(self, index: int) -> int: ...
    @overload
    def __call__(self, index: Ints) -> Ints: ...

    def __call__(self, index: int | Ints) -> int | Ints:
        found = self._places[index]
        return found if isinstance(index, np.ndarray) else int(found)


class Packed:
    """Samples of documents or examples, with the face of `Samples`: rows of whole ones, one
    after the other, by best fit; or one a row.

    Attention does not cross from one to another: position_ids begin at 0 with each, and with
    the padding at the end of a row. The label of a position is the next token, where that is a
    target of the same piece; the first token of a piece never is. Which of them share a row
    depends on their lengths alone, the order of rows on seed and epoch.
    """

    def __init__(
        self,
        shards: Shards,
        sequence_length: int,
        seed: int,
        *,
        packing: Literal["best_fit", "chunk", "none"] = "best_fit",
        long_examples: LongExamples = "drop",
        overlap: int = 1,
        pad: int = 0,
        group: int | None = None,
        full_rows: bool = True,
        virtual_tokens: int = 0,
        load: LoadTable | None = None,
        folder: Path | None = None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            shards: of documents, of which every token but the first is a target; or of examples,
                with weights.
            long_examples: what becomes of examples longer than `sequence_length`; told to
                `notice`. Documents are always split.
            overlap: of a document that is split, the tokens that a piece repeats of the one
                before, as context.
            pad: the token that fills rows up; never seen by a document, never a target.
            group: under packing `none`, the samples of a step (the global batch size) if these
                are to be of about one length.
            full_rows: under packing `chunk` or `none`, whether rows have `sequence_length`
                positions, as a compiled model wants it, or those of the batch's longest, in
                multiples of 8.
            virtual_tokens: positions with the ids -1, -2 and so on that stand before each piece,
                for a learned prompt or prefix.
            load: how samples are shuffled; over all of an epoch when not given.
            folder: where rows are kept from one start to the next; see `Pieces`.

        Raises:
            RequestError: for long examples under the policy `fail`.
        """
        self.shards, self.sequence_length, self.seed = shards, sequence_length, seed
        self.pad, self.group, self.load = pad, group, load or LoadTable()
        self.full_rows = full_rows or packing == "best_fit"
        self.virtual_tokens = virtual_tokens
        cut = Cut(sequence_length, packing == "best_fit", long_examples, overlap, virtual_tokens)
        self.pieces = Pieces(shards, cut, folder)
        for said, count in self.pieces.changed.items():
            notice(f"{count:,} of {shards.documents:,} examples are {said} (data.long_examples)")

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self.pieces)

    @property
    def tokens(self) -> int:
        """Tokens of documents in an epoch, padding not counted."""
        return self.pieces.counts.tokens

    def padding(self, batch_size: int) -> float:
        """The share of positions that are padding, in batches of `batch_size` samples."""
        positions = len(self) * self.sequence_length
        if not self.full_rows:  # one piece a row
            lengths = self._sizes()[self.order(0)(np.arange(len(self)))]
            first = np.arange(0, len(self), batch_size)
            longest = self._width(np.maximum.reduceat(lengths, first))
            positions = int((longest * np.diff([*first, len(self)])).sum())
        return 1 - self.tokens / positions

    def order(self, epoch: int) -> Order:
        """From a sample's number in the epoch to its index."""
        if self.group is not None:
            return self._grouped(epoch)
        return epoch_order(self.load, self.seed, epoch, len(self), len(self.shards))

    @cached_property
    def _grouped(self) -> Callable[[int], GroupedOrder]:
        lengths = self._sizes() - self.virtual_tokens
        size = self.group or 1
        # two, as a batch may cross epochs
        return lru_cache(2)(lambda epoch: GroupedOrder(lengths, self.seed, epoch, size))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_grouped"}

    def _sizes(self) -> Ints:
        """Positions that each row of one piece needs."""
        return self.pieces.sizes() + self.virtual_tokens

    def batch(self, indices: Ints) -> Batch:
        """The samples at these indices."""
        rows = [self.pieces.row(index) for index in indices.tolist()]
        longest = max(int(row[:, 1].sum()) + len(row) * self.virtual_tokens for row in rows)
        width = self.sequence_length if self.full_rows else int(self._width(np.array(longest)))
        shape = (len(rows), width)
        tokens = np.full(shape, self.pad, dtype=np.int64)
        weights = np.zeros(shape, dtype=np.float32)  # of the tokens as targets
        starts = np.zeros(shape, dtype=np.int64)  # where a piece or the padding begins: its place
        virtual = -1 - np.arange(self.virtual_tokens)
        for place, row in enumerate(rows):
            at = 0
            for begin, length, context in row.tolist():
                starts[place, at] = at
                first = at + self.virtual_tokens
                tokens[place, at:first] = virtual
                at = first + length
                self._copy(begin, tokens[place, first:at], weights[place, first:at])
                weights[place, first : first + context] = 0
            starts[place, at : at + 1] = at
        labels = np.where(weights > 0, tokens, IGNORE)
        labels, weights = (np.roll(x, -1, axis=1) for x in (labels, weights))
        positions = np.arange(width) - np.maximum.accumulate(starts, axis=1)
        weighted = self.pieces.counts.weighted
        arrays = (tokens, labels, positions, *([weights] if weighted else []))
        return Batch(*map(torch.from_numpy, arrays))

    def document_ids(self, index: int) -> tuple[str, ...]:
        """The documents or examples in the sample at this index."""
        ids = []
        for begin in self.pieces.row(index)[:, 0].tolist():
            shard, place = self._locate(begin)
            ids.append(shard.id(int(np.searchsorted(shard.offsets, place, "right")) - 1))
        return tuple(ids)

    def _copy(self, begin: int, tokens: Ints, weights: NDArray[np.float32]) -> None:
        """Fill in the tokens from a place of the run on, and their weights as targets."""
        shard, place = self._locate(begin)
        here = slice(place, place + len(tokens))
        tokens[:] = shard.tokens[here]
        weights[:] = 1 if shard.weights is None else shard.weights[here]

    def _locate(self, begin: int) -> tuple[Shard, int]:
        """The shard that holds this place of the run, and the place there."""
        number = int(np.searchsorted(self.shards.starts, begin, "right")) - 1
        return self.shards[number], begin - int(self.shards.starts[number])

    def _width(self, longest: Ints) -> Ints:
        return np.minimum(-(-longest // WIDTH) * WIDTH, self.sequence_length)
