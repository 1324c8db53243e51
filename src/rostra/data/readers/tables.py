"""Parquet and CSV: a document a row, streamed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from rostra.config.sources import CsvSource, ParquetSource
from rostra.data.records import BadRecord, Numbered, read_csv, rows_of
from rostra.data.sources import (
    BadRecords,
    Document,
    Part,
    Reader,
    find_parts,
    reading,
    refuse_empty,
)
from rostra.files import open_range

RANGE_BYTES = 32 << 20  # of the file
READ_BYTES = 4 << 20  # of a column, at once


def documents_of(
    reader: Reader, rows: Numbered, name: str, where: str, bad: BadRecords
) -> Generator[Document, None, bool]:
    """The documents of numbered rows of the part `name`; gives back whether there was a row."""
    filled = False
    for number, values in rows:
        filled = True
        here = f"{where}, row {number}"
        if isinstance(values, BadRecord):
            values.reject(here, bad)
        elif found := reader.document(values, f"{name}:{number}", here, bad):
            yield found
    return filled


@dataclass(frozen=True)
class ParquetReader(Reader):
    """Parquet files, large ones in ranges of row groups; the id is file and row.

    Only the columns that are named are read, page by page.
    """

    source: ParquetSource
    range_bytes: int = RANGE_BYTES
    kind: ClassVar[str] = "parquet"

    def parts(self, bad: BadRecords) -> list[Part]:
        found = find_parts(self.source.path, (".parquet",), self.key, bad)
        return [part for whole in found for part in self._ranges(whole)]

    def _ranges(self, whole: Part) -> Iterator[Part]:
        if whole.file.size <= 2 * self.range_bytes:
            yield whole
            return
        try:
            with open_range(whole.file) as source:
                about = pq.read_metadata(source)
        except (OSError, pa.ArrowException):
            yield whole  # reading it will say why
            return
        first, work = 0, 0
        for group in range(about.num_row_groups):
            columns = about.row_group(group)
            work += sum(columns.column(c).total_compressed_size for c in range(about.num_columns))
            last = group + 1 == about.num_row_groups
            if work >= self.range_bytes or last:
                yield Part(f"{whole.name}@{first}", whole.file, first, group + 1, work)
                first, work = group + 1, 0

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        name = part.name if part.stop is None else part.name.rpartition("@")[0]
        with (
            reading(part, bad),
            open_range(part.file) as source,
            pq.ParquetFile(source, buffer_size=READ_BYTES, pre_buffer=False) as table,
        ):
            if (columns := self._columns(table, part, bad)) is None:
                return
            groups = range(table.metadata.num_row_groups)
            number = sum(table.metadata.row_group(g).num_rows for g in groups[: part.start])
            chosen = list(groups[part.start : part.stop])
            if part.stop is None and not table.metadata.num_rows:
                refuse_empty(part.where, bad)
                return
            batches = table.iter_batches(256, row_groups=chosen, columns=columns)
            rows = (values for batch in batches for values in rows_of(batch))
            yield from documents_of(self, enumerate(rows, number + 1), name, part.where, bad)

    def _columns(self, table: Any, part: Part, bad: BadRecords) -> list[str] | None:
        """The columns to read; None when the file lacks one, and was rejected."""
        source = self.source
        wanted = [source.field, *([source.id_field] if source.id_field else []), *source.metadata]
        there = table.schema_arrow.names
        for name in wanted:
            if name not in there:
                problem = f"has no column {name!r} (its columns: {', '.join(there)})"
                bad.reject("no text", part.where, problem, f"Correct {self.key}.field")
                return None
        return list(dict.fromkeys(wanted))


@dataclass(frozen=True)
class CsvReader(Reader):
    """CSV with a header, plain or compressed; the id is file and row, the metadata the other
    columns."""

    source: CsvSource
    kind: ClassVar[str] = "csv"

    def parts(self, bad: BadRecords) -> list[Part]:
        suffixes = tuple(n + p for n in (".csv", ".tsv") for p in ("", ".gz", ".zst"))
        return find_parts(self.source.path, suffixes, self.key, bad)

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        with reading(part, bad):
            rows = read_csv(part.file, self.source.delimiter)
            if not (yield from documents_of(self, rows, part.name, part.where, bad)):
                refuse_empty(part.where, bad)
