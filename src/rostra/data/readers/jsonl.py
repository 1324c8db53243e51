"""JSON lines, plain or compressed; large plain files in ranges that many processes share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rostra.config.sources import JsonlSource
from rostra.data.readers.compressed import is_compressed, open_plain
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

RANGE_BYTES = 32 << 20
SUFFIXES = tuple(
    f".{name}{packed}"
    for name in ("jsonl", "ndjson", "json")
    for packed in ("", ".gz", ".zst")
    if (name, packed) != ("json", "")  # that is one value
)


@dataclass(frozen=True)
class JsonlReader(Reader):
    """JSON lines; the metadata of a document are the other keys.

    Its id is its file and line, or, in a file that is read in ranges, its first byte.
    """

    source: JsonlSource
    range_bytes: int = RANGE_BYTES
    kind: ClassVar[str] = "jsonl"

    def parts(self, bad: BadRecords) -> list[Part]:
        found = find_parts(self.source.path, SUFFIXES, self.key, bad)
        return [part for whole in found for part in self._ranges(whole)]

    def _ranges(self, whole: Part) -> Iterator[Part]:
        """A line belongs to the range in which its first byte lies."""
        size = whole.file.size
        if size <= 2 * self.range_bytes or is_compressed(whole.file):
            yield whole
            return
        for start in range(0, size, self.range_bytes):
            stop = min(start + self.range_bytes, size)
            yield Part(f"{whole.name}@{start}", whole.file, start, stop, stop - start)

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        filled = False
        with reading(part, bad):
            lines = _numbered(part) if part.stop is None else _in_range(part, part.stop)
            for number, line in lines:
                if not line.strip():
                    continue
                filled = True
                unit, mark = ("line", ":") if part.stop is None else ("byte", "@")
                where = f"{part.where}, {unit} {number}"
                if (values := self._values(line, where, bad)) is not None:
                    name = part.name if part.stop is None else part.name.rpartition("@")[0]
                    found = self.document(values, f"{name}{mark}{number}", where, bad)
                    if found is not None:
                        yield found
            if not filled and part.stop is None:
                refuse_empty(part.where, bad)

    def _values(self, line: bytes, where: str, bad: BadRecords) -> Any:
        """What a line holds; None when it was rejected."""
        try:
            return json.loads(line)
        except UnicodeDecodeError as error:
            bad.reject("encoding", where, f"byte {error.start} is not UTF-8", "Convert the file")
        except (ValueError, RecursionError) as error:
            bad.reject("not JSON", where, f"not JSON ({error})", "Correct the line")
        return None


def _numbered(part: Part) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, and their numbers."""
    with open_plain(part.file) as file:
        for number, line in enumerate(file, 1):
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _in_range(part: Part, stop: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the range, and where they do."""
    before = max(0, part.start - 1)  # only behind a line's end does another begin
    with open_range(part.file, before) as file:
        place = before + len(file.readline()) if part.start else 0
        while place < stop and (line := file.readline()):
            yield place, line.removeprefix(b"\xef\xbb\xbf") if place == 0 else line
            place += len(line)
