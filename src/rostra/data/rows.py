"""Which parts of documents or examples stand together in a row, for any number of them.

Rows are made block by block, a block being as many shards as have `BLOCK_TOKENS` tokens: so
making them takes the memory of a block. They are made once and kept in files beside the shards
(about 24 bytes a document, mapped into memory), because the number of rows of every block must
be known before the first sample: a start reads these numbers, and opens no shard.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rostra.data.cache import digest
from rostra.data.prepared import seal
from rostra.data.shards import Shard, Shards
from rostra.errors import RequestError
from rostra.store import commit_folder, read_manifest, sha256_file

Ints = NDArray[np.int64]
LongExamples = Literal["drop", "truncate", "split", "fail"]

FORMAT = 1  # raise it when the same shards would give other rows
BLOCK_TOKENS = 1 << 24  # a block has fewer than this and a shard more
OPEN_BLOCKS = 64


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
class Cut:
    """How documents or examples become pieces, and these rows."""

    sequence_length: int  # positions of a row
    fitted: bool = True  # rows by best fit; else one piece a row
    long: LongExamples = "drop"  # what becomes of what is longer than a row
    overlap: int = 1  # under `split`: tokens that a piece repeats of the one before
    virtual_tokens: int = 0  # positions before each piece

    @property
    def longest(self) -> int:
        """Tokens of a piece, at the most."""
        return max(1, self.sequence_length - self.virtual_tokens)


@dataclass(frozen=True)
class Block:
    """The rows of some shards."""

    pieces: Ints  # [pieces, 3], row by row: place of the first token in the run of all shards,
    #               tokens, and how many of these are context (no targets)
    starts: Ints  # [rows + 1]: the first piece of each row, and the end

    def row(self, index: int) -> Ints:
        """Its pieces: [pieces, 3]."""
        return self.pieces[self.starts[index] : self.starts[index + 1]]


@dataclass(frozen=True)
class Counts:
    """What is known of all rows before one is looked at."""

    rows: tuple[int, ...]  # of each block
    tokens: int
    targets: int
    weighted: bool  # whether a target counts other than once
    changed: dict[str, int]  # documents or examples that were cut or left out, by what was done


class Pieces:
    """What is trained on of documents or examples, in rows: all of each, but of long ones
    perhaps a part."""

    def __init__(self, shards: Shards, cut: Cut, folder: Path | None = None) -> None:
        """
        Args:
            folder: where rows are kept; without one, or where nothing can be written, they are
                made again by every process, block by block as they are needed.

        Raises:
            RequestError: when an example is longer than a row and the policy is `fail`.
        """
        self.shards, self.cut = shards, cut
        self._groups = _groups(shards)
        self._kept = folder and folder / f"rows-{self._key[:16]}"
        self._files: dict[str, Any] = {}  # of blocks whose hash was not looked at yet
        self._trusted: set[int] = set()
        counts = self._read()
        self.counts = counts or self._make()
        self.starts = np.cumsum([0, *self.counts.rows], dtype=np.int64)

    @property
    def _key(self) -> str:
        shards = [[shard.file, shard.documents, shard.tokens] for shard in self.shards.counts]
        return digest([FORMAT, BLOCK_TOKENS, asdict(self.cut), shards])

    def __len__(self) -> int:
        """Rows."""
        return int(self.starts[-1])

    @property
    def changed(self) -> dict[str, int]:
        """Documents or examples that were cut or left out, by what was done."""
        return self.counts.changed

    @cached_property
    def _block(self) -> Callable[[int], Block]:
        return lru_cache(OPEN_BLOCKS)(self._open)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_block"}

    def row(self, index: int) -> Ints:
        """The pieces of a row, as a `Block` has them."""
        block = int(np.searchsorted(self.starts, index, "right")) - 1
        return self._block(block).row(index - int(self.starts[block]))

    def sizes(self) -> Ints:
        """Tokens of each row; it takes the memory of them all."""
        sizes = [np.empty(0, dtype=np.int64)]
        for number in range(len(self._groups)):
            block = self._block(number)
            running = np.concatenate([[0], np.cumsum(block.pieces[:, 1])])
            sizes.append(np.diff(running[block.starts]))
        return np.concatenate(sizes)

    def _read(self) -> Counts | None:
        """The counts of rows that were made before; None when there are none, or broken ones."""
        if self._kept is None:
            return None
        try:
            manifest: dict[str, Any] = read_manifest(self._kept) or {}
            counts = dict(manifest["rows"])
            if counts.pop("digest") != digest(counts):
                return None
            self._files = manifest["files"]
            return Counts(**{**counts, "rows": tuple(counts["rows"])})
        except (KeyError, TypeError, OSError):
            return None

    def _make(self) -> Counts:
        """All rows, kept in files where that can be."""
        if self._kept is not None:
            with contextlib.suppress(OSError):  # nothing can be written there
                return self._make_files(self._kept)
        return _total([_rows(self.shards, group, self.cut)[1] for group in self._groups])

    def _make_files(self, path: Path) -> Counts:
        manifest: dict[str, Any] = {}  # filled in when all is counted, written on leaving
        found = []
        with commit_folder(path, rows=manifest) as aside:
            for number, group in enumerate(self._groups):
                block, counts = _rows(self.shards, group, self.cut)
                np.save(aside / f"{number}-pieces.npy", block.pieces)
                np.save(aside / f"{number}-starts.npy", block.starts)
                found.append(counts)
            total = _total(found)
            manifest.update(seal(asdict(total)))
        self._read()
        return total

    def _open(self, number: int) -> Block:
        """A block from its files; made again where these are not what they were."""
        if self._kept is not None and self._files:
            with contextlib.suppress(OSError, ValueError, KeyError):
                names = [f"{number}-{array}.npy" for array in ("pieces", "starts")]
                paths = [self._kept / name for name in names]
                hashes = [self._files[name]["sha256"] for name in names]
                if number in self._trusted or [sha256_file(path) for path in paths] == hashes:
                    self._trusted.add(number)
                    return Block(*(np.load(path, mmap_mode="r") for path in paths))
        return _rows(self.shards, self._groups[number], self.cut)[0]


def _groups(shards: Shards) -> list[range]:
    """The shards of each block."""
    groups, first, tokens = [], 0, 0
    for index, counts in enumerate(shards.counts):
        tokens += counts.tokens
        if tokens >= BLOCK_TOKENS or index == len(shards) - 1:
            groups.append(range(first, index + 1))
            first, tokens = index + 1, 0
    return groups


def _rows(shards: Shards, group: range, cut: Cut) -> tuple[Block, Counts]:
    """The rows of some shards."""
    parts = [_shard_pieces(shards, index, cut) for index in group]
    pieces = np.concatenate([part for part, _ in parts])
    rows = np.arange(len(pieces))
    if cut.fitted:
        rows = best_fit(pieces[:, 1] + cut.virtual_tokens, cut.sequence_length)
        # Rows come in the order of their first pieces, so that neighbours are read together.
        _, first, rows = np.unique(rows, return_index=True, return_inverse=True)
        rows = np.argsort(np.argsort(first))[rows]
    order = np.argsort(rows, kind="stable")  # pieces by row
    starts = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))
    counts = _total([counts for _, counts in parts])
    return Block(pieces[order], starts), Counts(
        (len(starts) - 1,), counts.tokens, counts.targets, counts.weighted, counts.changed
    )


def _total(counts: list[Counts]) -> Counts:
    changed: Counter[str] = Counter()
    for each in counts:
        changed.update(each.changed)
    return Counts(
        tuple(number for each in counts for number in each.rows),
        sum(each.tokens for each in counts),
        sum(each.targets for each in counts),
        any(each.weighted for each in counts),
        dict(changed),
    )


def _shard_pieces(shards: Shards, index: int, cut: Cut) -> tuple[Ints, Counts]:
    """The pieces of a shard that have a target: [pieces, 3] as a `Block` has them."""
    shard = shards[index]
    lengths = np.diff(shard.offsets)
    long = lengths > cut.longest
    if cut.long == "fail" and long.any():
        first = int(np.argmax(long))
        raise RequestError(
            f"{shard.id(first)}: this example has {lengths[first]:,} tokens, more than "
            f"data.sequence_length ({cut.longest:,}). Raise it, or set data.long_examples to drop, "
            "truncate or split."
        )
    documents, first_token, size = _cut(lengths, cut)
    begins = shard.offsets[documents] + first_token
    # What stands before a piece is not seen there, so its first token is no target at least.
    context = np.where(first_token > 0, cut.overlap, 1)
    targets = _targets(shard, begins + np.minimum(context, size), begins + size)
    kept = targets > 0
    dropped = long if cut.long == "drop" else np.zeros_like(long)
    done = {"drop": "left out", "truncate": "truncated", "split": "split"}
    reasons = {
        f"longer than data.sequence_length ({cut.longest:,}): {done.get(cut.long)}": long,
        "without a target": ~dropped & (np.bincount(documents, kept, len(lengths)) == 0),
    }
    counts = Counts(
        (),
        int(size[kept].sum()),
        int(targets.sum()),
        shard.weights is not None and bool(((shard.weights != 0) & (shard.weights != 1)).any()),
        {reason: int(which.sum()) for reason, which in reasons.items() if which.any()},
    )
    return np.stack([shards.starts[index] + begins, size, context], axis=1)[kept], counts


def _targets(shard: Shard, begins: Ints, ends: Ints) -> Ints:
    """Targets among the tokens [begin, end), for all of them at once."""
    if shard.weights is None:  # of documents, every token
        return ends - begins
    running = np.concatenate([[0], np.cumsum(shard.weights > 0)])
    found: Ints = running[ends] - running[begins]
    return found


def _cut(lengths: Ints, cut: Cut) -> tuple[Ints, Ints, Ints]:
    """Of each piece its document or example, its first token in there, and its length."""
    numbers = np.arange(len(lengths))
    if cut.long != "split":
        kept = numbers[lengths <= cut.longest] if cut.long == "drop" else numbers
        return kept, np.zeros_like(kept), np.minimum(lengths[kept], cut.longest)
    # A piece begins with the last tokens of the one before, so that each target is in one.
    step = max(1, cut.longest - cut.overlap)
    parts = np.maximum(1, -(-(lengths - cut.overlap) // step))
    documents = np.repeat(numbers, parts)
    first = (np.arange(len(documents)) - np.repeat(np.cumsum(parts) - parts, parts)) * step
    return documents, first, np.minimum(lengths[documents] - first, cut.longest)
