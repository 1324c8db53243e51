"""What each document brings to the search for duplicates, in files: one for each task.

Arrow IPC, a row a document in the order they were read: `content` (the first 16 bytes of the
text's SHA-256), `name` (a hash of source and id), and `band_0`, `band_1`, …, so that one band of
all files can be read without the others. Hashes do not compress, so the files are plain, and are
mapped into memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rostra.config.duplicates import DuplicatesTable
from rostra.data.duplicates.clusters import duplicates
from rostra.data.duplicates.minhash import MinHash
from rostra.data.duplicates.words import Hashes

CONTENT = 16  # bytes


class HashWriter:
    """Writes the hashes of one source's documents; a context manager."""

    def __init__(self, path: Path, source: str, table: DuplicatesTable) -> None:
        self.source = source
        self.minhash = MinHash.of(table) if table.find == "minhash" else None
        bands = table.bands if self.minhash else 0
        self.schema = pa.schema(
            [("content", pa.binary(CONTENT)), ("name", pa.uint64())]
            + [(f"band_{band}", pa.uint64()) for band in range(bands)]
        )
        self._file = pa.ipc.new_file(str(path), self.schema)

    def add(self, ids: Sequence[str], texts: Sequence[str], sha256: Sequence[bytes]) -> None:
        """Add documents; `sha256` are the digests of `texts` in UTF-8.

        A document without text (it comes in tokens, say) is equal to those with its digest alone.
        """
        content = pa.array([digest[:CONTENT] for digest in sha256], pa.binary(CONTENT))
        names = pa.array([_name(self.source, id) for id in ids], pa.uint64())
        words = [text or digest.hex() for text, digest in zip(texts, sha256, strict=True)]
        bands = self.minhash.signatures(words).T if self.minhash else ()
        columns = [content, names, *(pa.array(np.ascontiguousarray(band)) for band in bands)]
        self._file.write_batch(pa.RecordBatch.from_arrays(columns, schema=self.schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def find_duplicates(files: Sequence[Path]) -> list[NDArray[np.bool_]]:
    """For each file, which of its documents to drop: [documents of the file] each."""
    if not files:
        return []
    content, names = _content(files), _column(files, "name")
    drop = duplicates(content, names, _bands(files))
    return np.split(drop, np.cumsum([_rows(file) for file in files])[:-1])


def _content(files: Sequence[Path]) -> Hashes:
    words = [
        np.frombuffer(chunk.buffers()[1], ">u8").reshape(-1, 2)[chunk.offset :][: len(chunk)]
        for file in files
        for chunk in _open(file).read_all()["content"].chunks
    ]
    return np.concatenate([np.empty((0, 2), np.uint64), *words], dtype=np.uint64)


def _bands(files: Sequence[Path]) -> Iterator[Hashes]:
    for name in _open(files[0]).schema.names:
        if name.startswith("band_"):
            yield _column(files, name)


def _column(files: Sequence[Path], name: str) -> Hashes:
    chunks = (chunk for file in files for chunk in _open(file).read_all()[name].chunks)
    return np.concatenate([np.empty(0, np.uint64), *(chunk.to_numpy() for chunk in chunks)])


def _rows(file: Path) -> int:
    return _open(file).read_all().num_rows


def _open(file: Path) -> pa.ipc.RecordBatchFileReader:
    return pa.ipc.open_file(pa.memory_map(str(file)))


def _name(source: str, id: str) -> int:
    raw = f"{source}\0{id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
