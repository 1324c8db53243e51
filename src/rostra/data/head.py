"""What of streamed sources is prepared all the same: some first documents.

They give the held-out documents that a run is measured on, and train its tokenizer if it has
none. The sources are listed, and nothing else of them is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from rostra.config.data import DataSection
from rostra.data.cache import ContentHashes, digest
from rostra.data.permutation import Permutation
from rostra.data.reading import make_reader
from rostra.data.sources import BadRecords, Document, Part, Reader
from rostra.data.tasks import Task, tasks_of

HEAD_BYTES = 16 << 20  # of all sources together, about
TRAINED_BYTES = 64 << 20  # the same where they train a tokenizer
HASHED_BYTES = 64 << 20  # a larger local file is known by its size alone


@dataclass(frozen=True)
class HeadReader(Reader):
    """The first documents of each part that another reader reads: about `limit` bytes."""

    reader: Reader
    limit: int
    kind: ClassVar[str] = "head"

    @property
    def name(self) -> str:
        return self.reader.name

    def parts(self, bad: BadRecords) -> list[Part]:
        return self.reader.parts(bad)

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        size = 0
        for document in self.reader.documents(part, bad):
            yield document
            if (size := size + len(document.text)) >= self.limit:
                return

    def read(self, part: Part, bad: BadRecords) -> Iterator[pa.RecordBatch]:
        if not self.reader.tokens:
            yield from super().read(part, bad)
            return
        size = 0
        for batch in self.reader.read(part, bad):
            yield batch
            if (size := size + batch.nbytes) >= self.limit:
                return


@dataclass(frozen=True)
class Head:
    """The first documents of all sources.

    Attributes:
        identity: other when the listing of the sources is: names, sizes, versions on stores.
    """

    tasks: list[Task]
    identity: dict[str, Any]

    @classmethod
    def of(cls, data: DataSection, bad: BadRecords) -> Head:
        """List the sources, and choose parts of each by chance, always the same ones."""
        whole = HEAD_BYTES if data.tokenizer.vocabulary is None else TRAINED_BYTES
        limit = max(1, whole // len(data.sources))
        work: list[tuple[HeadReader, Part]] = []
        listed = []
        for index, source in enumerate(data.sources):
            reader = make_reader(source, index)
            assert isinstance(reader, Reader)  # the config has refused examples
            parts = reader.parts(bad)
            listed.append(digest([_identity(part) for part in parts]))
            head = HeadReader(index, source, reader, limit)
            work += [(head, part) for part in _first(parts, limit)]
        identity = {"bytes": whole, "listed": listed}
        return cls(tasks_of(work, data.prepare.task_bytes), identity)


def _identity(part: Part) -> list[Any]:
    version = "" if part.file.local else part.file.version
    return [part.name, part.start, part.stop, part.file.size, version]


def _first(parts: list[Part], size: int) -> Iterator[Part]:
    """Parts in a fixed order of chance, until there are so many bytes."""
    order = Permutation(0, 0, len(parts))
    for place in range(len(parts)):
        part = parts[order(place)]
        yield part
        if (size := size - part.size) <= 0:
            return


class HeadHashes(ContentHashes):
    """Names for the content of parts, none of which is read in full if it is large."""

    def hash(self, part: Part) -> str | None:
        if part.file.local and part.file.size > HASHED_BYTES:
            return digest(part.file.size)
        return super().hash(part)
