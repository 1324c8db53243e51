"""Where documents come from: the interface of all readers, and what they share.

A reader lists its parts (units of work, in a fixed order), and reads one part at a time as
Arrow batches of `SCHEMA`. Readers and parts are plain values, so that parts can be read by
other processes.
"""

from __future__ import annotations

import contextlib
import json
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pyarrow as pa

from rostra.config.sources import SourceSection
from rostra.errors import RequestError
from rostra.files import File, find_files, open_range

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.large_string()),
        ("source", pa.string()),
        ("metadata", pa.string()),  # JSON
    ]
)

BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_194_304


@dataclass(frozen=True)
class Part:
    """A unit of work: a file, or a range of one that can be split.

    Attributes:
        name: unique in its source, and the same on every machine.
        start, stop: bytes of a file in lines, row groups of a Parquet file; to its end if None.
        work: bytes to read, of a range; None is the whole file.
    """

    name: str
    file: File
    start: int = 0
    stop: int | None = None
    work: int | None = None

    @property
    def size(self) -> int:
        """Bytes to read."""
        return self.file.size if self.work is None else self.work

    @property
    def where(self) -> str:
        """Its file, for messages."""
        return self.file.url

    def fingerprint(self) -> tuple[int | str, ...] | None:
        """Other when the file's content may be; None if it is not there.

        Of a local file its size and times by now. On a store size and version as listed, for
        what is read there is of that version or an error.
        """
        if (path := self.file.local) is None:
            return self.file.size, self.file.version
        try:
            stat = path.stat()
        except OSError:
            return None
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@dataclass(frozen=True)
class Document:
    id: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class BadRecords:
    """What becomes of data that cannot be used: `fail` raises, `skip` counts and announces."""

    policy: Literal["fail", "skip"]
    notice: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter)  # by reason
    examples: list[dict[str, str]] = field(default_factory=list)
    announced: int = 20  # of one reason; there may be millions
    kept: int = 1000  # examples

    def reject(self, reason: str, where: str, problem: str, advice: str) -> None:
        """Refuse a file or record.

        Raises:
            RequestError: under the policy `fail`.
        """
        if self.policy == "fail":
            raise RequestError(
                f"{where}: {problem}. {advice}, or set data.on_bad_record to skip to go on "
                "without it."
            )
        self.counts[reason] += 1
        if len(self.examples) < self.kept:
            self.examples.append({"where": where, "reason": reason, "problem": problem})
        if self.counts[reason] <= self.announced:
            self.notice(f"skipped {where}: {problem}")
        elif self.counts[reason] == self.announced + 1:
            self.notice(f"skipped more for the same reason ({reason}); the manifest has the count")


@dataclass(frozen=True)
class Reader(ABC):
    """Reads one source; `index` is its place in `data.sources`."""

    index: int
    source: SourceSection
    kind: ClassVar[str]  # the source's `type`
    tokens: ClassVar[bool] = False  # batches have `tokens` (large_list of uint32), not `text`

    @property
    def name(self) -> str:
        return self.source.name or f"{self.kind}:{self.index}"

    @property
    def key(self) -> str:
        """The source's place in the config, for messages."""
        return f"data.sources.{self.index}"

    @abstractmethod
    def parts(self, bad: BadRecords) -> list[Part]:
        """The units of work in their fixed order."""

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        """The documents of `part`; what cannot be used goes to `bad`. A reader has this, or a
        `read` of its own."""
        raise NotImplementedError(f"{type(self).__name__} has batches only: see `read`")

    def read(self, part: Part, bad: BadRecords) -> Iterator[pa.RecordBatch]:
        """The documents of `part` as Arrow batches of `SCHEMA`."""
        rows: list[Document] = []
        characters = 0
        for document in self.documents(part, bad):
            rows.append(document)
            characters += len(document.text)
            if len(rows) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                yield self._batch(rows)
                rows, characters = [], 0
        if rows:
            yield self._batch(rows)

    def document(self, values: Any, id: str, where: str, bad: BadRecords) -> Document | None:
        """The document of a record: text under `field`, its own id under `id_field`, all else
        metadata. None when it was rejected."""
        name, own = getattr(self.source, "field", "text"), getattr(self.source, "id_field", None)
        if not isinstance(values, dict) or not isinstance(text := values.get(name), str):
            problem = f"has no text under {name!r}"
            if isinstance(values, dict):
                problem += f" (its keys: {', '.join(values) or 'none'})"
            bad.reject("no text", where, problem, f"Set {self.key}.field to the key of the text")
            return None
        if not text.strip():
            bad.reject("empty", where, f"the text under {name!r} is empty", "Remove it")
            return None
        if not _is_unicode(text):
            problem = f"the text under {name!r} holds half a surrogate pair"
            bad.reject("encoding", where, problem, "Correct it")
            return None
        if own is not None and values.get(own) is None:
            bad.reject("no id", where, f"has nothing under {own!r}", f"Correct {self.key}.id_field")
            return None
        rest = {key: value for key, value in values.items() if key not in (name, own)}
        return Document(id if own is None else str(values[own]), text, rest)

    def _batch(self, rows: list[Document]) -> pa.RecordBatch:
        columns = [
            pa.array([row.id for row in rows], pa.string()),
            pa.array([row.text for row in rows], pa.large_string()),
            pa.array([self.name] * len(rows), pa.string()),
            pa.array([_json(row.metadata) for row in rows], pa.string()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@contextlib.contextmanager
def reading(part: Part, bad: BadRecords) -> Iterator[None]:
    """Refuse the part's file when it breaks; what was read before is used."""
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError, pa.ArrowException) as error:
        unreadable(part.where, error, bad)


def find_parts(path: str, suffixes: tuple[str, ...], key: str, bad: BadRecords) -> list[Part]:
    """The files that `path` (a file, a folder, or a glob) names, sorted by name.

    Below a folder, files of the given suffixes count, hidden files and folders do not.

    Raises:
        RequestError: when a store refuses or does not answer; under `bad`, for no files.
    """
    try:
        found = find_files(path, suffixes, lambda where, error: unreadable(where, error, bad))
        return [Part(name, file) for name, file in found]
    except FileNotFoundError as error:
        nothing = f"{error.strerror or error} ({key}.path)"
        bad.reject("missing", path, nothing, f"Correct {key}.path")
        return []


def read_whole(file: File, bad: BadRecords) -> bytes | None:
    """The content of a file; None when it was rejected as unreadable or empty."""
    try:
        with open_range(file) as source:
            raw = source.read()
    except OSError as error:
        unreadable(file.url, error, bad)
        return None
    if not raw.strip():
        refuse_empty(file.url, bad)
        return None
    return raw


def decode(raw: bytes, encoding: str, where: str, key: str, bad: BadRecords) -> str | None:
    """The text of a file without its byte order mark; None when it was rejected.

    Raises:
        RequestError: when there is no such encoding.
    """
    try:
        ascii_inside = "a".encode(encoding) == b"a"
        if ascii_inside and (zero := raw.find(b"\0")) >= 0:
            _binary(where, zero, bad)
            return None
        text = raw.decode(encoding).removeprefix("\ufeff")
    except UnicodeError as error:
        offset = getattr(error, "start", 0)
        problem = f"not {encoding}: byte {offset} (0x{raw[offset]:02x}) cannot be decoded"
        bad.reject("encoding", where, problem, f"Set {key} to its encoding, convert the file")
        return None
    except (LookupError, ValueError) as error:
        raise RequestError(f"{key}: {encoding!r} is no text encoding that Python knows") from error
    if not _is_unicode(text):
        bad.reject("encoding", where, "holds half a surrogate pair", "Convert the file to UTF-8")
        return None
    if (zero := text.find("\0")) >= 0:
        _binary(where, zero, bad)
        return None
    if not text.strip():
        refuse_empty(where, bad)
        return None
    return text


def _json(metadata: dict[str, Any]) -> str:
    """As JSON; dates and the like as text."""
    return json.dumps(metadata, default=str)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _binary(where: str, offset: int, bad: BadRecords) -> None:
    bad.reject("binary", where, f"binary, not text (NUL at {offset})", "Take the file away")


def refuse_empty(where: str, bad: BadRecords) -> None:
    """Refuse a file without any text."""
    bad.reject("empty", where, "empty, there is no text in it", "Take the file away")


def unreadable(where: str, error: Exception, bad: BadRecords) -> None:
    """Refuse a file for an error of reading it."""
    problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    bad.reject("unreadable", where, problem, "Make it readable")
