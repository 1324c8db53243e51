"""What all formats are read and written as: documents of token ids, some with weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rostra.data.shards import Shard

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


class Broken(Exception):
    """What is wrong with a file: said of it by whoever knows its name."""


class Row(NamedTuple):
    """A document as it was read; `id` is None where the format has none."""

    id: str | None
    tokens: NDArray[np.uint32]  # [length]
    weights: NDArray[np.float32] | None = None  # [length], of examples


@dataclass(frozen=True)
class Documents:
    """Documents to be written, those of one shard: `tokens[offsets[d]:offsets[d + 1]]` are
    document d's, and so are the weights of examples."""

    ids: list[str]
    bytes: list[int]  # of each text in UTF-8
    tokens: NDArray[Any]  # uint16 or uint32, [tokens]
    offsets: NDArray[np.int64]  # [documents + 1]
    weights: NDArray[np.float32] | None = None  # [tokens]

    @classmethod
    def of(cls, shard: Shard) -> Documents:
        ids, sizes = (shard.batch.column(name).to_pylist() for name in ("id", "bytes"))
        return cls(ids, sizes, shard.tokens, shard.offsets, shard.weights)

    def __len__(self) -> int:
        return len(self.ids)

    def row(self, document: int) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        """Tokens and weights of a document."""
        here = slice(self.offsets[document], self.offsets[document + 1])
        return self.tokens[here], None if self.weights is None else self.weights[here]


def as_tokens(values: NDArray[Any]) -> NDArray[np.uint32]:
    """Token ids in the one type that all formats are read as.

    Raises:
        Broken: when they are no row of whole numbers from 0 to 2^32 - 1.
    """
    if values.ndim != 1 or values.dtype.kind not in "iu":
        shape = "x".join(map(str, values.shape)) or "one"
        raise Broken(f"holds {shape} values of {values.dtype}, not a row of token ids")
    if values.size and values.dtype not in (np.uint8, np.uint16, np.uint32):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= 1 << 32:
            raise Broken(f"holds {low if low < 0 else high}, which is no token id")
    return values.astype(np.uint32, copy=False)


def from_bytes(raw: bytes, dtype: str | None, name: str) -> NDArray[Any]:
    """The numbers of a field of plain bytes, little-endian.

    Raises:
        Broken: when `dtype` was not given, or the bytes are no whole number of it.
    """
    if dtype is None:
        raise Broken(f"has {name!r} as plain bytes; set the source's `dtype` to what they are")
    kind = np.dtype(dtype).newbyteorder("<")
    if len(raw) % kind.itemsize:
        raise Broken(f"has {len(raw)} bytes under {name!r}, no whole number of {dtype}")
    return np.frombuffer(raw, kind)


def as_weights(values: NDArray[Any] | None, tokens: int) -> NDArray[np.float32] | None:
    """Weights as they go with so many tokens.

    Raises:
        Broken: when they are others in number or kind.
    """
    if values is None:
        return None
    if values.shape != (tokens,) or values.dtype.kind != "f":
        raise Broken(f"has weights of {values.dtype} {values.shape} with {tokens} tokens")
    return values.astype(np.float32, copy=False)


def rows_of(batch: pa.RecordBatch, field: str) -> list[Row]:
    """The rows of an Arrow batch: token ids under `field`, and `id` and `weights` if there.

    Raises:
        Broken: when the field is missing or no list of whole numbers.
    """
    names = batch.schema.names
    if field not in names:
        raise Broken(f"has no column {field!r} (it has {', '.join(names) or 'none'})")
    tokens, offsets = _lists(batch.column(field), field)
    weights = None
    if "weights" in names:
        weights, starts = _lists(batch.column("weights"), "weights")
        if not np.array_equal(starts, offsets):
            raise Broken("has weights that are not as many as the tokens")
        weights = as_weights(weights, len(tokens))
    ids = batch.column("id").to_pylist() if "id" in names else [None] * batch.num_rows
    kept = as_tokens(tokens)
    rows = []
    for k, id in enumerate(ids):
        here = slice(offsets[k], offsets[k + 1])
        rows.append(Row(_text(id), kept[here], None if weights is None else weights[here]))
    return rows


def _lists(column: pa.Array, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The values of a column of lists, one after the other, and where each list begins."""
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not lists or column.null_count or column.flatten().null_count:
        raise Broken(f"has {name!r} as {column.type}, not as lists of numbers without gaps")
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0]


def _text(id: Any) -> str | None:
    return None if id is None else str(id)
