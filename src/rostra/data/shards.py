"""Shards: Arrow IPC files of tokens, one row a document and one record batch a file, so that
a memory map of the file gives its tokens as one array.

Shards of examples have one row an example, whole, and with each token its weight as a target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rostra.data.local_cache import CacheFull
from rostra.data.mapping import Content, MappedFiles

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


def variant_split(number: int) -> str:
    """Where variant 1, 2 and so on of the training examples are (`data.augment`)."""
    return f"train-v{number}"


OPEN = 256  # shards of a split that a process has open: a map and a file descriptor each
PATIENCE = 30.0  # seconds for other processes to let go of something in a full cache


@dataclass(frozen=True)
class ShardCounts:
    """What a manifest says of one shard."""

    file: str
    documents: int
    tokens: int
    bytes: int  # of the documents' text in UTF-8
    source: int = 0  # its place in data.sources


@dataclass(frozen=True)
class Shard:
    """An opened shard. `tokens[offsets[d]:offsets[d + 1]]` are document d's."""

    tokens: NDArray[Any]  # uint16 or uint32, of all documents, in the memory map
    offsets: NDArray[np.int64]  # [documents + 1]
    batch: Any  # the Arrow record batch
    weights: NDArray[np.float32] | None = None  # of examples: one with each token

    @classmethod
    def of(cls, content: Content) -> Shard:
        """The shard in a file of this (verified) content; nothing is copied."""
        batch = pa.ipc.open_file(pa.py_buffer(content)).get_batch(0)
        rows = batch.column("tokens")
        tokens = rows.values.to_numpy(zero_copy_only=True)
        weights = None
        if "weights" in batch.schema.names:
            weights = batch.column("weights").values.to_numpy(zero_copy_only=True)
        return cls(tokens, rows.offsets.to_numpy(zero_copy_only=True), batch, weights)

    def id(self, document: int) -> str:
        return str(self.batch.column("id")[document].as_py())


def open_shard(path: Path, sha256: str) -> Shard:
    """Map a shard, once its content is what the manifest says.

    Raises:
        RequestError: when it is not, or the file is missing.
    """
    return Shard.of(MappedFiles().checked(path, sha256))


class Shards:
    """The shards of one split as one run of tokens, each opened and verified at first use.

    At most `keep_open` stay open, those used last. A value of this class can be pickled when
    `open_file` can.
    """

    def __init__(
        self,
        counts: Sequence[ShardCounts],
        open_file: Callable[[str], Shard],
        keep_open: int = OPEN,
    ) -> None:
        self.files = [shard.file for shard in counts]
        numbers = [(s.documents, s.tokens, s.bytes, s.source) for s in counts]
        # Arrays, as there may be 100,000 shards: [shards] each.
        columns = np.array(numbers, dtype=np.int64).reshape(-1, 4).T
        self.shard_documents, self.shard_tokens, self.shard_bytes, self.sources = columns
        self.documents, self.tokens, self.bytes = (int(column.sum()) for column in columns[:3])
        # The place of each shard's first token in the run; one more for the end.
        self.starts = np.concatenate([[0], np.cumsum(self.shard_tokens)])
        self._keep_open = keep_open
        self._open = lru_cache(keep_open)(open_file)

    @property
    def counts(self) -> list[ShardCounts]:
        """What the manifest says of each."""
        columns = (self.shard_documents, self.shard_tokens, self.shard_bytes, self.sources)
        rows = np.stack(columns, axis=1).tolist()
        return [ShardCounts(file, *row) for file, row in zip(self.files, rows, strict=True)]

    def of_source(self, index: int) -> Shards:
        """Those of one source, as a run of their own; what is open is shared with this one."""
        chosen = [shard for shard in self.counts if shard.source == index]
        part = Shards(chosen, self._open.__wrapped__, self._keep_open)
        part._open = self._open
        return part

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Shard:
        file = self.files[index]
        try:
            return self._open(file)
        except CacheFull:
            return self._open_with_room(file)

    def _open_with_room(self, file: str) -> Shard:
        """Open a shard when the cache is full: of our own open ones, perhaps, or of others'."""
        self._open.cache_clear()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._open(file)
            except CacheFull:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.counts, self._open.__wrapped__, self._keep_open)
