"""Where documents come from: a reader for each kind of source, behind one interface.

A reader lists its parts (units of work, in a fixed order), and reads one part at a time as
Arrow batches of `SCHEMA`. Readers and parts are plain values, so that parts can be read by
other processes.
"""

from __future__ import annotations

import glob
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa

from rostra.config.sources import JsonlSource, TextSource
from rostra.errors import RequestError

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
    """A unit of work: `name` is unique in its source and the same on every machine."""

    name: str
    path: Path

    def fingerprint(self) -> tuple[int, int, int] | None:
        """Size and times of the file: other when its content may be; None if it is not there."""
        try:
            stat = self.path.stat()
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

    def reject(self, reason: str, where: str | Path, problem: str, advice: str) -> None:
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
            self.examples.append({"where": str(where), "reason": reason, "problem": problem})
        if self.counts[reason] <= self.announced:
            self.notice(f"skipped {where}: {problem}")
        elif self.counts[reason] == self.announced + 1:
            self.notice(f"skipped more for the same reason ({reason}); the manifest has the count")


@dataclass(frozen=True)
class Reader(ABC):
    """Reads one source; `index` is its place in `data.sources`."""

    index: int
    kind: ClassVar[str]  # the source's `type`

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index}"

    @property
    def key(self) -> str:
        """The source's place in the config, for messages."""
        return f"data.sources.{self.index}"

    @abstractmethod
    def parts(self, bad: BadRecords) -> list[Part]:
        """The units of work in their fixed order."""

    @abstractmethod
    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        """The documents of `part`; what cannot be used goes to `bad`."""

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

    def _batch(self, rows: list[Document]) -> pa.RecordBatch:
        columns = [
            pa.array([row.id for row in rows], pa.string()),
            pa.array([row.text for row in rows], pa.large_string()),
            pa.array([self.name] * len(rows), pa.string()),
            pa.array([json.dumps(row.metadata) for row in rows], pa.string()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@dataclass(frozen=True)
class TextReader(Reader):
    """Text files; the id of a document is its path below the source's."""

    source: TextSource
    kind: ClassVar[str] = "text"

    def parts(self, bad: BadRecords) -> list[Part]:
        return find_parts(self.source.path, (".txt", ".md"), self.key, bad)

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        raw = read_bytes(part.path, bad)
        if raw is None:
            return
        text = decode(raw, self.source.encoding, part.path, f"{self.key}.encoding", bad)
        if text is not None:
            yield Document(part.name, text)


@dataclass(frozen=True)
class JsonlReader(Reader):
    """JSON lines; the id of a document is its file and line, its metadata the other keys."""

    source: JsonlSource
    kind: ClassVar[str] = "jsonl"

    def parts(self, bad: BadRecords) -> list[Part]:
        return find_parts(self.source.path, (".jsonl",), self.key, bad)

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        filled = 0
        try:
            with part.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    filled += 1
                    if number == 1:
                        line = line.removeprefix(b"\xef\xbb\xbf")  # noqa: PLW2901
                    where = f"{part.path}, line {number}"
                    if (record := self._record(line, where, bad)) is not None:
                        text = record.pop(self.source.field)
                        yield Document(f"{part.name}:{number}", text, record)
        except OSError as error:
            _unreadable(part.path, error, bad)
            return
        if not filled:
            _empty(part.path, bad)

    def _record(self, line: bytes, where: str, bad: BadRecords) -> dict[str, Any] | None:
        """The object of a line, with text under the field; None when it was rejected."""
        name = self.source.field
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            bad.reject("encoding", where, f"byte {error.start} is not UTF-8", "Convert the file")
            return None
        except (ValueError, RecursionError) as error:
            bad.reject("not JSON", where, f"not JSON ({error})", "Correct the line")
            return None
        if not isinstance(record, dict) or not isinstance(text := record.get(name), str):
            problem = f"has no text under {name!r}"
            if isinstance(record, dict):
                problem += f" (its keys: {', '.join(record) or 'none'})"
            bad.reject("no text", where, problem, f"Set {self.key}.field to the key of the text")
            return None
        if not text.strip():
            bad.reject("empty", where, f"the text under {name!r} is empty", "Remove the line")
            return None
        if not _is_unicode(text):
            problem = f"the text under {name!r} holds half a surrogate pair"
            bad.reject("encoding", where, problem, "Correct the line")
            return None
        return record


def find_parts(path: str, suffixes: tuple[str, ...], key: str, bad: BadRecords) -> list[Part]:
    """The files that `path` (a file, a folder, or a glob) names, sorted by name.

    Below a folder, files of the given suffixes count, hidden files and folders do not.
    """
    start = Path(path).expanduser()
    if start.is_file():
        return [Part(part_name(start, start.parent), start)]
    if start.is_dir():
        files: Iterable[Path] = (p for p in walk(start, bad) if p.suffix.lower() in suffixes)
        nothing = f"no {' or '.join(suffixes)} file in this folder ({key}.path)"
    elif glob.has_magic(path):
        found = glob.glob(str(start), recursive=True)  # noqa: PTH207 - it may be absolute
        files = (p for p in map(Path, found) if p.is_file())
        start = _fixed(start)
        nothing = f"no file matches ({key}.path)"
    else:
        nothing = "is no regular file" if start.exists() else "no such file or folder"
        files, nothing = (), f"{nothing} ({key}.path)"
    parts = sorted((Part(part_name(p, start), p) for p in files), key=lambda part: part.name)
    if not parts:
        bad.reject("missing", path, nothing, f"Correct {key}.path")
    return parts


def walk(folder: Path, bad: BadRecords) -> Iterator[Path]:
    """Every file below `folder`, hidden ones and those in hidden folders passed over."""

    def refuse(error: OSError) -> None:
        _unreadable(error.filename, error, bad)

    seen: set[tuple[int, int]] = set()  # links may lead round in circles
    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here = Path(root).stat()
        if (here.st_dev, here.st_ino) in seen:
            folders.clear()
            continue
        seen.add((here.st_dev, here.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(root, name)


def _fixed(pattern: Path) -> Path:
    """The part of a glob before its first wildcard."""
    return next(p for p in pattern.parents if not glob.has_magic(str(p)))


def part_name(path: Path, root: Path) -> str:
    """`path` below `root`, with slashes, as text even where a name is not UTF-8."""
    return os.fsencode(path.relative_to(root).as_posix()).decode("utf-8", "backslashreplace")


def read_bytes(path: Path, bad: BadRecords) -> bytes | None:
    """The content of a file; None when it was rejected as unreadable or empty."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        _unreadable(path, error, bad)
        return None
    if not raw.strip():
        _empty(path, bad)
        return None
    return raw


def decode(raw: bytes, encoding: str, where: Path, key: str, bad: BadRecords) -> str | None:
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
        _empty(where, bad)
        return None
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _binary(where: Path, offset: int, bad: BadRecords) -> None:
    bad.reject("binary", where, f"binary, not text (NUL at {offset})", "Take the file away")


def _empty(where: Path, bad: BadRecords) -> None:
    bad.reject("empty", where, "empty, there is no text in it", "Take the file away")


def _unreadable(where: str | Path, error: OSError, bad: BadRecords) -> None:
    problem = f"cannot be read ({error.strerror or error})"
    bad.reject("unreadable", where, problem, "Make it readable")
