"""From examples to samples: whole examples fitted into rows, or one example a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray

from rostra.batch import IGNORE, Batch
from rostra.data.permutation import Permutation
from rostra.data.shards import Shard, Shards
from rostra.errors import RequestError

Ints = NDArray[np.int64]
LongExamples = Literal["drop", "truncate", "split", "fail"]

WIDTH = 8  # rows of a batch are as wide as its longest, rounded up to a multiple of this


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """The row of each item, when items go into rows of `capacity` by best-fit decreasing.

    The longest goes first, each into the fullest row that has room for it (Ding et al. 2024,
    arXiv:2404.10830), so that almost no room is left. O(n log n) for n items, of which none
    may be longer than a row.
    """
    order = np.argsort(-lengths, kind="stable")
    rows: list[int] = []
    count = 0
    open_rows: dict[int, list[int]] = defaultdict(list)  # by the room that they have
    rooms: list[int] = []  # the keys of `open_rows`, sorted
    for length in lengths[order].tolist():
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = count, capacity
            count += 1
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        rows.append(row)
        if room := room - length:
            if room not in open_rows:
                insort(rooms, room)
            open_rows[room].append(row)
    found = np.empty(len(lengths), dtype=np.int64)
    found[order] = rows
    return found


@dataclass(frozen=True)
class Pieces:
    """What is trained on of the examples: all of each, but of long ones perhaps a part."""

    begins: Ints  # place of the first token in the run of all shards' tokens
    lengths: Ints
    targets: int
    weighted: bool  # whether a target counts other than once
    changed: dict[str, int]  # examples that were cut or left out, by what was done

    @classmethod
    def of(cls, shards: Shards, longest: int, policy: LongExamples) -> Pieces:
        """The pieces of all examples, none longer than `longest` tokens.

        Raises:
            RequestError: when an example is longer and the policy is `fail`.
        """
        parts = [_shard_pieces(shards, index, longest, policy) for index in range(len(shards))]
        changed: dict[str, int] = {}
        for part in parts:
            for reason, count in part.changed.items():
                changed[reason] = changed.get(reason, 0) + count
        none = [np.empty(0, dtype=np.int64)]  # where there are no shards
        return cls(
            np.concatenate([part.begins for part in parts] or none),
            np.concatenate([part.lengths for part in parts] or none),
            sum(part.targets for part in parts),
            any(part.weighted for part in parts),
            changed,
        )


def _shard_pieces(shards: Shards, index: int, longest: int, policy: LongExamples) -> Pieces:
    shard = shards[index]
    weights = _weights(shard)
    lengths = np.diff(shard.offsets)
    long = lengths > longest
    if policy == "fail" and long.any():
        first = int(np.argmax(long))
        raise RequestError(
            f"{shard.id(first)}: this example has {lengths[first]:,} tokens, more than "
            f"data.sequence_length ({longest:,}). Raise it, or set data.long_examples to drop, "
            "truncate or split."
        )
    examples, first_token, size = _cut(lengths, longest, policy)
    begins = shard.offsets[examples] + first_token
    # The first token of a piece has nothing before it, so it is no target there.
    running = np.concatenate([[0], np.cumsum(weights > 0)])
    targets = running[begins + size] - running[begins + 1]
    kept = targets > 0
    dropped = long if policy == "drop" else np.zeros_like(long)
    done = {"drop": "left out", "truncate": "truncated", "split": "split"}
    reasons = {
        f"longer than data.sequence_length ({longest:,}): {done.get(policy)}": long,
        "without a target": ~dropped & (np.bincount(examples, kept, len(lengths)) == 0),
    }
    return Pieces(
        shards.starts[index] + begins[kept],
        size[kept],
        int(targets.sum()),
        bool(((weights != 0) & (weights != 1)).any()),
        {reason: int(which.sum()) for reason, which in reasons.items() if which.any()},
    )


def _weights(shard: Shard) -> NDArray[np.float32]:
    if shard.weights is None:
        raise ValueError("this shard holds documents, not examples")
    return shard.weights


def _cut(lengths: Ints, longest: int, policy: LongExamples) -> tuple[Ints, Ints, Ints]:
    """Of each piece its example, its first token in there, and its length."""
    numbers = np.arange(len(lengths))
    if policy != "split":
        kept = numbers[lengths <= longest] if policy == "drop" else numbers
        return kept, np.zeros_like(kept), np.minimum(lengths[kept], longest)
    # A part begins with the last token of the part before, so that each target is in one part.
    step = max(1, longest - 1)
    parts = np.maximum(1, -(-(lengths - 1) // step))
    examples = np.repeat(numbers, parts)
    first = (np.arange(len(examples)) - np.repeat(np.cumsum(parts) - parts, parts)) * step
    return examples, first, np.minimum(lengths[examples] - first, longest)


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
    """Samples of examples, with the face of `Samples`: rows of whole examples, one after the
    other, by best fit; or one example a row.

    Attention does not cross examples: position_ids begin at 0 with each, and with the padding
    at the end of a row. The label of a position is the next token, where that is a target of
    the same example; the first token of an example never is. Which examples share a row
    depends on their lengths alone, the order of rows on seed and epoch.
    """

    def __init__(
        self,
        shards: Shards,
        sequence_length: int,
        seed: int,
        *,
        packing: Literal["best_fit", "none"] = "best_fit",
        long_examples: LongExamples = "drop",
        pad: int = 0,
        group: int | None = None,
        full_rows: bool = True,
        virtual_tokens: int = 0,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            shards: with weights, as `prepare` makes them of examples.
            long_examples: what becomes of those longer than `sequence_length`; told to `notice`.
            pad: the token that fills rows up; never seen by an example, never a target.
            group: under packing `none`, the samples of a step (the global batch size) if these
                are to be of about one length.
            full_rows: under packing `none`, whether rows have `sequence_length` positions, as a
                compiled model wants it, or those of the batch's longest, in multiples of 8.
            virtual_tokens: positions with the ids -1, -2 and so on that stand before each piece,
                for a learned prompt or prefix.

        Raises:
            RequestError: for long examples under the policy `fail`.
        """
        self.shards, self.sequence_length, self.seed = shards, sequence_length, seed
        self.pad, self.group = pad, group
        self.full_rows = full_rows or packing == "best_fit"
        self.virtual_tokens = virtual_tokens
        longest = max(1, sequence_length - virtual_tokens)
        self.pieces = pieces = Pieces.of(shards, longest, long_examples)
        self._sizes = pieces.lengths + virtual_tokens
        for said, count in pieces.changed.items():
            notice(f"{count:,} of {shards.documents:,} examples are {said} (data.long_examples)")
        rows = np.arange(len(pieces.lengths))
        if packing == "best_fit":
            rows = best_fit(self._sizes, sequence_length)
        self._order = np.argsort(rows, kind="stable")  # pieces by row
        self._starts = np.searchsorted(rows[self._order], np.arange(rows.max(initial=-1) + 2))
        self._grouped = lru_cache(2)(self._grouped_order)  # a batch may cross epochs

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._starts) - 1

    @property
    def tokens(self) -> int:
        """Tokens of examples in an epoch, padding not counted."""
        return int(self.pieces.lengths.sum())

    def padding(self, batch_size: int) -> float:
        """The share of positions that are padding, in batches of `batch_size` samples."""
        widths = np.full(len(self), self.sequence_length)
        if not self.full_rows:
            lengths = self._sizes[self.order(0)(np.arange(len(self)))]
            first = np.arange(0, len(self), batch_size)
            longest = self._width(np.maximum.reduceat(lengths, first))
            widths = np.repeat(longest, np.diff([*first, len(self)]))
        return 1 - self.tokens / int(widths.sum())

    def order(self, epoch: int) -> Permutation | GroupedOrder:
        """From a sample's number in the epoch to its index."""
        return (
            Permutation(self.seed, epoch, len(self)) if self.group is None else self._grouped(epoch)
        )

    def _grouped_order(self, epoch: int) -> GroupedOrder:
        assert self.group is not None
        return GroupedOrder(self.pieces.lengths, self.seed, epoch, self.group)

    def batch(self, indices: Ints) -> Batch:
        """The samples at these indices."""
        rows = [self._row(index) for index in indices.tolist()]
        longest = max(int(self._sizes[row].sum()) for row in rows)
        width = self.sequence_length if self.full_rows else int(self._width(np.array(longest)))
        shape = (len(rows), width)
        tokens = np.full(shape, self.pad, dtype=np.int64)
        weights = np.zeros(shape, dtype=np.float32)  # of the tokens as targets
        starts = np.zeros(shape, dtype=np.int64)  # where a piece or the padding begins: its place
        virtual = -1 - np.arange(self.virtual_tokens)
        for place, row in enumerate(rows):
            at = 0
            for piece in row.tolist():
                shard, begin, end = self._locate(piece)
                starts[place, at] = at
                first = at + self.virtual_tokens
                tokens[place, at:first] = virtual
                here = slice(first, first + end - begin)
                tokens[place, here] = shard.tokens[begin:end]
                weights[place, here] = _weights(shard)[begin:end]
                weights[place, first] = 0
                at = here.stop
            starts[place, at : at + 1] = at
        labels = np.where(weights > 0, tokens, IGNORE)
        labels, weights = (np.roll(x, -1, axis=1) for x in (labels, weights))
        positions = np.arange(width) - np.maximum.accumulate(starts, axis=1)
        arrays = (tokens, labels, positions, *([weights] if self.pieces.weighted else []))
        return Batch(*map(torch.from_numpy, arrays))

    def document_ids(self, index: int) -> tuple[str, ...]:
        """The examples in the sample at this index."""
        ids = []
        for piece in self._row(index).tolist():
            shard, begin, _ = self._locate(piece)
            ids.append(shard.id(int(np.searchsorted(shard.offsets, begin, "right")) - 1))
        return tuple(ids)

    def _row(self, index: int) -> Ints:
        return self._order[self._starts[index] : self._starts[index + 1]]

    def _locate(self, piece: int) -> tuple[Shard, int, int]:
        """The shard that holds a piece, and its first and last place there."""
        begin = int(self.pieces.begins[piece])
        number = int(np.searchsorted(self.shards.starts, begin, "right")) - 1
        begin -= int(self.shards.starts[number])
        return self.shards[number], begin, begin + int(self.pieces.lengths[piece])

    def _width(self, longest: Ints) -> Ints:
        return np.minimum(-(-longest // WIDTH) * WIDTH, self.sequence_length)
