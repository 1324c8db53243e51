"""Megatron's `.bin` and `.idx`: the indexed dataset of Megatron-LM, version 1.

`PREFIX.bin` has the token ids of all sequences, one after the other. `PREFIX.idx` has, all
little-endian: the 9 bytes "MMIDIDX\\0\\0"; the version, 1 (uint64); the code of the ids' type
(uint8); the number of sequences, and of documents plus one (uint64 each); then of each sequence
its length (int32), of each the byte in `.bin` where it begins (int64), and the sequence with
which each document begins, and one more for the end (int64). We write a document as one
sequence, in uint16 where the ids allow it and in int32 otherwise.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rostra.data.formats.rows import Broken, Documents, Row, as_tokens

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # of 34 bytes
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
READ_TOKENS = 1 << 22  # at once, about

Range = Callable[[int, int], bytes]  # the bytes of a file from one place to another


class MegatronWriter:
    """Writes `PREFIX.bin` as documents come, and `PREFIX.idx` at the end."""

    def __init__(self, prefix: Path, dtype: type[Any]) -> None:
        self._bin, self._idx = (prefix.with_name(f"{prefix.name}.{e}") for e in ("bin", "idx"))
        self._dtype = np.dtype("<u2" if dtype is np.uint16 else "<i4")
        self._lengths: list[NDArray[np.int32]] = []
        self._file = self._bin.open("wb")

    def add(self, documents: Documents) -> None:
        tokens = documents.tokens
        if tokens.size and int(tokens.max()) >= 1 << (16 if self._dtype.itemsize == 2 else 31):
            raise ValueError(f"token {tokens.max()} does not fit into {self._dtype}")
        tokens.astype(self._dtype).tofile(self._file)
        self._lengths.append(np.diff(documents.offsets).astype("<i4"))

    def close(self) -> None:
        """Write the index."""
        self._file.close()
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        starts = np.zeros(len(lengths) + 1, "<i8")
        np.cumsum(lengths, out=starts[1:], dtype=np.int64)
        code = next(c for c, name in CODES.items() if name == self._dtype.name)
        with self._idx.open("wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1))
            lengths.tofile(file)
            (starts[:-1] * self._dtype.itemsize).tofile(file)
            np.arange(len(lengths) + 1, dtype="<i8").tofile(file)


@dataclass(frozen=True)
class Index:
    """What the header of an `.idx` says; its arrays are read where they are needed."""

    dtype: np.dtype[Any]
    sequences: int
    documents: int

    @classmethod
    def of(cls, read: Range, size: int) -> Index:
        """From an `.idx` of `size` bytes.

        Raises:
            Broken: when it is no such file, of another version, or of another size.
        """
        head = read(0, HEADER.size)
        if len(head) < HEADER.size:
            raise Broken("is cut: it has not even a header")
        magic, version, code, sequences, ends = HEADER.unpack(head)
        if magic != MAGIC:
            raise Broken("is no index of Megatron's (it does not begin with MMIDIDX)")
        if version != 1 or code not in CODES:
            raise Broken(f"has version {version} and type {code}; known are version 1 of {CODES}")
        whole = HEADER.size + 12 * sequences + 8 * ends
        if size not in (whole, whole + sequences):  # with a mode, a byte a sequence
            raise Broken(f"has {size:,} bytes, and {sequences:,} sequences make {whole:,}")
        if not ends:
            raise Broken("has no documents, not even the end of the last one")
        return cls(np.dtype(CODES[code]).newbyteorder("<"), sequences, ends - 1)

    def firsts(self, read: Range, start: int, stop: int) -> NDArray[np.int64]:
        """Of documents `start` to `stop`, and of the one after, the first sequence."""
        at = HEADER.size + 12 * self.sequences
        found = _array(read(at + 8 * start, at + 8 * (stop + 1)), "<i8")
        bounds = found.size != stop - start + 1 or found[0] < 0 or found[-1] > self.sequences
        if bounds or (np.diff(found) < 0).any():
            raise Broken(f"has no order in its documents {start} to {stop}")
        return found

    def places(
        self, read: Range, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of sequences `start` to `stop`: lengths in tokens, and bytes where they begin."""
        at = HEADER.size
        lengths = _array(read(at + 4 * start, at + 4 * stop), "<i4").astype(np.int64)
        at += 4 * self.sequences
        starts = _array(read(at + 8 * start, at + 8 * stop), "<i8")
        follow = starts[:-1] + lengths[:-1] * self.dtype.itemsize == starts[1:]
        if lengths.size != stop - start or starts.size != lengths.size or not follow.all():
            raise Broken(f"has sequences {start} to {stop} that do not follow one another")
        if (lengths < 0).any() or (starts < 0).any():
            raise Broken(f"has a sequence of negative length or place in {start} to {stop}")
        return lengths, starts

    def size(self, read: Range) -> int:
        """Bytes that the `.bin` has."""
        if not self.sequences:
            return 0
        lengths, starts = self.places(read, self.sequences - 1, self.sequences)
        return int(starts[0] + lengths[0] * self.dtype.itemsize)


def read_megatron(index: Index, idx: Range, bin: Range, start: int, stop: int) -> Iterator[Row]:
    """Documents `start` to `stop`, some at a time.

    Raises:
        Broken: when the index contradicts itself, or the `.bin` is cut.
    """
    firsts = index.firsts(idx, start, stop)
    lengths, starts = index.places(idx, int(firsts[0]), int(firsts[-1]))
    ends = np.concatenate([[0], np.cumsum(lengths)])[firsts - firsts[0]]  # of documents, in tokens
    size, origin = index.dtype.itemsize, int(starts[0]) if len(starts) else 0
    document = 0
    while document < len(ends) - 1:
        full = ends[document] + READ_TOKENS
        last = max(document + 1, int(np.searchsorted(ends, full, "right")) - 1)
        begin, end = int(ends[document]), int(ends[last])
        raw = bin(origin + begin * size, origin + end * size)
        if len(raw) != (end - begin) * size:
            raise Broken(f"ends too early: byte {origin + end * size:,} is not there")
        tokens = as_tokens(np.frombuffer(raw, index.dtype))
        for k in range(document, last):
            yield Row(None, tokens[ends[k] - begin : ends[k + 1] - begin])
        document = last


def _array(raw: bytes, dtype: str) -> NDArray[Any]:
    if len(raw) % np.dtype(dtype).itemsize:
        raise Broken("is cut")
    return np.frombuffer(raw, dtype)
