"""Parquet and Arrow: a row a document, its token ids a list.

Parquet is written with the columns `id`, `bytes` (of the text), `tokens` and, of examples,
`weights`; its pages carry checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rostra.data.formats.rows import Broken, Documents, Row, rows_of

GROUP_TOKENS = 1 << 20  # of a row group, about


def write_parquet(documents: Documents, path: Path) -> None:
    """Write one Parquet file."""
    offsets = pa.array(documents.offsets)
    columns = {
        "id": pa.array(documents.ids, pa.string()),
        "bytes": pa.array(documents.bytes, pa.int64()),
        "tokens": pa.LargeListArray.from_arrays(offsets, pa.array(documents.tokens)),
    }
    if documents.weights is not None:
        weights = pa.array(documents.weights)
        columns["weights"] = pa.LargeListArray.from_arrays(offsets, weights)
    batch = pa.RecordBatch.from_pydict(columns)
    options = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    with pq.ParquetWriter(path, batch.schema, **options) as writer:
        for start, stop in _groups(documents):
            writer.write_batch(batch.slice(start, stop - start))


def _groups(documents: Documents) -> Iterator[tuple[int, int]]:
    """Runs of documents that hold about `GROUP_TOKENS`, and at least one document."""
    start = 0
    while start < len(documents):
        full = documents.offsets[start] + GROUP_TOKENS
        stop = max(start + 1, int(np.searchsorted(documents.offsets, full)))
        stop = min(stop, len(documents))
        yield start, stop
        start = stop


def open_parquet(file: BinaryIO) -> pq.ParquetFile:
    """Raises Broken when it is no whole Parquet file."""
    try:
        return pq.ParquetFile(file, page_checksum_verification=True)
    except pa.ArrowException as error:
        raise Broken(f"is no whole Parquet file ({error})") from error


def parquet_groups(file: BinaryIO) -> list[tuple[int, int]]:
    """Of each row group, documents and bytes."""
    metadata = open_parquet(file).metadata
    groups = (metadata.row_group(k) for k in range(metadata.num_row_groups))
    return [(group.num_rows, group.total_byte_size) for group in groups]


def read_parquet(file: BinaryIO, start: int, stop: int | None, field: str) -> Iterator[Row]:
    """The rows of the row groups from `start` on, before `stop`."""
    opened = open_parquet(file)
    groups = list(range(start, opened.num_row_groups if stop is None else stop))
    there = opened.schema_arrow.names
    columns = [name for name in ("id", field, "weights") if name in there] or None
    try:
        for batch in opened.iter_batches(batch_size=1024, row_groups=groups, columns=columns):
            yield from rows_of(batch, field)
    except (pa.ArrowException, OSError) as error:
        raise Broken(f"cannot be read ({error})") from error


def read_arrow(raw: bytes, field: str) -> Iterator[Row]:
    """The rows of an Arrow IPC file: of the random access format, or of the streaming one that
    the datasets library writes."""
    try:
        content = pa.py_buffer(raw)
        if raw[:6] == b"ARROW1":
            opened = pa.ipc.open_file(content)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        else:
            _check_ends(raw)
            batches = iter(pa.ipc.open_stream(content))
        for batch in batches:
            yield from rows_of(batch, field)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise Broken(f"is no whole Arrow file ({error})") from error


def _check_ends(raw: bytes) -> None:
    """A stream ends with a message of length 0; without one it was cut between two messages."""
    if raw[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
        raise Broken("ends too early: it was cut, or not written to its end")
