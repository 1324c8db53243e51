"""Text files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rostra.config.sources import TextSource
from rostra.data.sources import BadRecords, Document, Part, Reader, decode, find_parts, read_whole


@dataclass(frozen=True)
class TextReader(Reader):
    """Text files; the id of a document is its path below the source's."""

    source: TextSource
    kind: ClassVar[str] = "text"

    def parts(self, bad: BadRecords) -> list[Part]:
        return find_parts(self.source.path, (".txt", ".md"), self.key, bad)

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        raw = read_whole(part.file, bad)
        if raw is None:
            return
        text = decode(raw, self.source.encoding, part.where, f"{self.key}.encoding", bad)
        if text is not None:
            yield Document(part.name, text)
