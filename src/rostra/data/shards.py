"""Shards: Arrow IPC files of tokens, one row a document and one record batch a file, so that
a memory map of the file gives its tokens as one array.

Shards of examples have one row an example, whole, and with each token its weight as a target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rostra.errors import RequestError

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


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

    def id(self, document: int) -> str:
        return str(self.batch.column("id")[document].as_py())


def open_shard(path: Path, sha256: str) -> Shard:
    """Map a shard, once its content is what the manifest says.

    Raises:
        RequestError: when it is not, or the file is missing.
    """
    advice = "Delete that file and start the same command again: the data is then prepared anew."
    try:
        source = pa.memory_map(str(path))
    except (OSError, pa.ArrowInvalid) as error:  # the latter when it is empty
        raise RequestError(f"{path}: this shard cannot be opened ({error}). {advice}") from error
    content = source.read_buffer()  # no copy: what is hashed is what is used
    if hashlib.sha256(content).hexdigest() != sha256:
        raise RequestError(f"{path}: this shard is corrupt (its SHA-256 is another). {advice}")
    batch = pa.ipc.open_file(source).get_batch(0)
    rows = batch.column("tokens")
    tokens = rows.values.to_numpy(zero_copy_only=True)
    weights = None
    if "weights" in batch.schema.names:
        weights = batch.column("weights").values.to_numpy(zero_copy_only=True)
    return Shard(tokens, rows.offsets.to_numpy(zero_copy_only=True), batch, weights)


class Shards:
    """The shards of one split as one run of tokens, each opened and verified at first use."""

    def __init__(self, counts: list[ShardCounts], open_file: Callable[[str], Shard]) -> None:
        self.counts = counts
        self._open_file = open_file
        self._opened: dict[int, Shard] = {}
        self.documents = sum(shard.documents for shard in counts)
        self.tokens = sum(shard.tokens for shard in counts)
        self.bytes = sum(shard.bytes for shard in counts)
        # The place of each shard's first token in the run; one more for the end.
        self.starts = np.cumsum([0, *(shard.tokens for shard in counts)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> Shard:
        if index not in self._opened:
            self._opened[index] = self._open_file(self.counts[index].file)
        return self._opened[index]
