"""Writing shards: documents or examples gathered until a shard is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rostra.data.shards import ShardCounts


class ShardWriter:
    """Writes the shards of one split: one after the other, each closed when it is full.

    `task` keeps their names apart from those that other tasks write for the same split;
    `source` is the place in data.sources that all documents come from.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: type[Any],
        shard_tokens: int,
        keep_text: bool,
        task: int | None = None,
        source: int = 0,
    ) -> None:
        self.folder = folder
        self.split = split
        self.task = task
        self.source = source
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.keep_text = keep_text
        self.closed: list[ShardCounts] = []
        self._clear()

    def _clear(self) -> None:
        self._ids: list[str] = []
        self._bytes: list[int] = []
        self._tokens: list[NDArray[Any]] = []
        self._weights: list[NDArray[np.float32]] = []
        self._texts: list[str] = []
        self._held = 0

    def add(
        self,
        id: str,
        text: str,
        tokens: NDArray[Any],
        size: int,
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Add a document of `size` bytes; a document is never cut. Examples have `weights`,
        as many as tokens: all of what a writer is given, or none."""
        self._ids.append(id)
        self._bytes.append(size)
        self._tokens.append(tokens)
        if weights is not None:
            self._weights.append(weights)
        if self.keep_text:
            self._texts.append(text)
        self._held += len(tokens)
        if self._held >= self.shard_tokens:
            self.close()

    def _number(self) -> str:
        number = len(self.closed)
        if self.task is None:
            return f"{number:05d}"
        return f"{self.task:05d}" + (f"-{number:05d}" if number else "")

    def close(self) -> None:
        """Write what is held, if anything."""
        if not self._ids:
            return
        name = f"{self.split}-{self._number()}.arrow"
        offsets = np.zeros(len(self._tokens) + 1, dtype=np.int64)
        np.cumsum([len(tokens) for tokens in self._tokens], out=offsets[1:])
        tokens = pa.array(np.concatenate(self._tokens), pa.from_numpy_dtype(self.dtype))
        columns = {
            "id": pa.array(self._ids, pa.string()),
            "bytes": pa.array(self._bytes, pa.int64()),
            "tokens": pa.LargeListArray.from_arrays(offsets, tokens),
        }
        if self._weights:
            weights = pa.array(np.concatenate(self._weights), pa.float32())
            columns["weights"] = pa.LargeListArray.from_arrays(offsets, weights)
        if self.keep_text:
            columns["text"] = pa.array(self._texts, pa.large_string())
        batch = pa.RecordBatch.from_pydict(columns)
        with (
            pa.OSFile(str(self.folder / name), "wb") as file,
            pa.ipc.new_file(file, batch.schema) as writer,
        ):
            writer.write_batch(batch)
        counts = len(self._ids), self._held, sum(self._bytes)
        self.closed.append(ShardCounts(name, *counts, self.source))
        self._clear()
