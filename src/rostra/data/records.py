"""Records of files: JSON, JSON lines, Parquet, CSV, folders and hub ids of the datasets library.

A record is a table of values with the place it came from. What examples are made of it says
`rostra.data.examples`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rostra.config.sources import RecordsSource
from rostra.data.hub import dataset_failed, found_file, saved_dataset, the_library
from rostra.data.readers.compressed import open_plain, plain_suffix
from rostra.data.sources import BadRecords, Part, find_parts
from rostra.errors import RequestError
from rostra.files import File, is_url, local_path, open_range

SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SPLIT_NAMES = re.compile(r"(?<![a-z])(train|test|valid|validation|dev|eval)(?:ing)?(?![a-z])")
LONGEST_FIELD = 1 << 30  # of CSV; its reader's default, 128 KiB, is less than a long answer


class BadRecord(Exception):
    """A record that cannot be used; whoever holds its place hands it to `BadRecords`."""

    def __init__(self, reason: str, problem: str, advice: str) -> None:
        super().__init__(problem)
        self.reason, self.problem, self.advice = reason, problem, advice

    def reject(self, where: str, bad: BadRecords) -> None:
        """Refuse what lies at `where` (see `BadRecords.reject`)."""
        bad.reject(self.reason, where, self.problem, self.advice)


@dataclass(frozen=True)
class Record:
    """`where` names file and number for people, `id` the same below the source's path."""

    where: str
    id: str
    values: dict[str, Any]


def find_records(source: RecordsSource, key: str, bad: BadRecords) -> list[Part]:
    """The files that hold the records of a source, in a fixed order.

    Args:
        key: the source's place in the config, for messages.

    Raises:
        RequestError: for a dataset that cannot be loaded; under `bad`, for missing files.
    """
    path = local_path(source.path)
    local = not is_url(source.path)
    if source.format in ("auto", "dataset"):
        whole = "[" not in source.split
        if whole and (parts := saved_dataset(source.path, source.split, key)):
            return parts
        if local and (_is_hub(path, source) or (path.is_dir() and _is_hub_like(path, source))):
            return _loaded_dataset(source, key)
    if "[" in source.split:
        raise RequestError(
            f"{key}.split: {source.split!r} is a slice, and {source.path} is not of the hub; name "
            "a whole split, or give a file with what you want of it"
        )
    parts = find_parts(source.path, _suffixes(source.format), key, bad)
    folder = path.is_dir() if local else not _is_one(source.path, parts)
    return _of_split(parts, source, key, bad) if folder else parts


def _suffixes(format: str) -> tuple[str, ...]:
    known = [s for s, f in SUFFIXES.items() if format in ("auto", f)]
    return tuple(suffix + packed for suffix in known for packed in ("", ".gz", ".zst"))


def _is_one(url: str, parts: list[Part]) -> bool:
    """Whether a URL is that of a file, or a glob."""
    return [part.file.url for part in parts] == [url] or any(c in url for c in "*?[")


def _of_split(parts: list[Part], source: RecordsSource, key: str, bad: BadRecords) -> list[Part]:
    """The files in a folder that are named after the split, if any is named after one."""
    named = {part.name: SPLIT_NAMES.search(part.name.lower()) for part in parts}
    wanted = source.split.removesuffix("ation")
    chosen = [p for p in parts if (m := named[p.name]) and m[1].startswith(wanted)]
    if any(named.values()) and not chosen:
        problem = f"no file of split {source.split!r}"
        bad.reject("missing", source.path, problem, f"Correct {key}.split")
        return []
    return chosen or parts


def read_records(part: Part, source: RecordsSource, key: str, bad: BadRecords) -> Iterator[Record]:
    """The records of one file; what cannot be used goes to `bad` by file and number."""
    told = source.format not in ("auto", "dataset")
    kind = source.format if told else SUFFIXES.get(plain_suffix(part.file))
    if kind is None:
        known = ", ".join(SUFFIXES)
        advice = f"Set {key}.format (known endings: {known})"
        bad.reject("format", part.where, "its ending tells no format of records", advice)
        return
    found = False
    try:
        for number, values in _READERS[kind](part.file):
            found = True
            where = f"{part.where}, {_UNITS[kind]} {number}"
            if isinstance(values, BadRecord):
                values.reject(where, bad)
            else:
                yield Record(where, f"{part.name}:{number}", values)
    except BadRecord as fault:
        fault.reject(part.where, bad)
        return
    except (OSError, pa.ArrowException) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        bad.reject("unreadable", part.where, problem, "Make it readable")
        return
    if not found:
        bad.reject("empty", part.where, "holds no record", "Take the file away")


Numbered = Iterator[tuple[int, "dict[str, Any] | BadRecord"]]


def _json(file: File) -> Numbered:
    with open_plain(file) as source:
        raw = source.read().removeprefix(b"\xef\xbb\xbf")
    try:
        # A byte that is not UTF-8 survives as half a surrogate pair, to be found in its record.
        found = json.loads(raw.decode("utf-8", "surrogateescape"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and b"\n" in raw.strip():  # JSON lines, under another name
            yield from _jsonl(file)
            return
        place = f"line {error.lineno}, column {error.colno}"
        raise BadRecord(
            "not JSON", f"not JSON ({error.msg} at {place})", "Correct the file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadRecord("not JSON", f"not JSON ({error})", "Correct the file") from error
    if isinstance(found, dict) and isinstance(found.get("data"), list):
        found = found["data"]
    if not isinstance(found, list):
        raise BadRecord("not JSON", "holds no list of records", "Make it a list of objects")
    for number, values in enumerate(found, 1):
        yield number, _checked(values)


def _jsonl(file: File) -> Numbered:
    with open_plain(file) as lines:
        for number, raw in enumerate(lines, 1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            try:
                yield number, _checked(json.loads(line.decode("utf-8", "surrogateescape")))
            except (ValueError, RecursionError) as error:
                yield number, BadRecord("not JSON", f"not JSON ({error})", "Correct the line")


def read_csv(file: File, delimiter: str = ",") -> Numbered:
    """The rows of a CSV file with a header, by the header's names."""
    csv.field_size_limit(LONGEST_FIELD)
    with io.TextIOWrapper(open_plain(file), "utf-8-sig", "surrogateescape", newline="") as lines:
        rows = csv.DictReader(lines, strict=True, delimiter=delimiter)
        number = 0
        while True:
            number += 1
            try:
                values = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                problem = f"not CSV ({error}); what follows in the file is left out"
                yield number, BadRecord("not CSV", problem, "Correct the row")
                return
            if None in values or None in values.values():
                many = "more" if None in values else "fewer"
                problem = f"has {many} fields than the header"
                yield number, BadRecord("not CSV", problem, "Correct the row")
            else:
                yield number, _checked(values)


def _parquet(file: File) -> Numbered:
    with open_range(file) as source, pq.ParquetFile(source) as table:
        yield from _rows(table.iter_batches(1024))


def read_arrow(file: File) -> Numbered:
    """The rows of a file as the datasets library writes them: an Arrow stream."""
    with open_range(file) as source, pa.ipc.open_stream(source) as batches:
        yield from _rows(iter(batches))


def _rows(batches: Iterator[pa.RecordBatch]) -> Numbered:
    number = 0
    for batch in batches:
        for values in rows_of(batch):
            number += 1
            yield number, values if isinstance(values, BadRecord) else _without_nulls(values)


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BadRecord]:
    """The rows of a batch; one whose text is not UTF-8 costs only itself."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for row in range(batch.num_rows):
        try:
            yield batch.slice(row, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield _not_utf8(f"byte {error.start} of a text")


def _without_nulls(value: Any) -> Any:
    """Structs without the fields that are null: columns give every struct the keys of all."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _checked(values: Any) -> dict[str, Any] | BadRecord:
    """`values`, or what is wrong with them."""
    if not isinstance(values, dict):
        kind = type(values).__name__
        return BadRecord("wrong type", f"is no object but a {kind}", "Correct the record")
    return next((_not_utf8(name) for name in values if _is_broken(values[name])), values)


def _is_broken(value: Any) -> bool:
    """Whether a text in `value` holds half a surrogate pair, as bytes that are not UTF-8 do."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return True
        return False
    if isinstance(value, dict):
        return any(_is_broken(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_is_broken, value))


def _not_utf8(what: str) -> BadRecord:
    return BadRecord("encoding", f"{what!r} is not UTF-8", "Convert the file to UTF-8")


_READERS: dict[str, Callable[[File], Numbered]] = {
    "json": _json,
    "jsonl": _jsonl,
    "csv": read_csv,
    "parquet": _parquet,
    "arrow": read_arrow,
}
_UNITS = {"json": "record", "jsonl": "line", "csv": "row", "parquet": "row", "arrow": "row"}


def _is_hub(path: Path, source: RecordsSource) -> bool:
    """Whether `path` can only be a name on the hub."""
    named = HUB_ID.fullmatch(source.path) and path.suffix.lower() not in SUFFIXES
    return not path.exists() and (bool(named) or source.format == "dataset")


def _is_hub_like(folder: Path, source: RecordsSource) -> bool:
    """Whether a folder says itself which of its files are which part of a dataset."""
    card = folder / "README.md"
    declared = card.is_file() and "\nconfigs:" in card.read_text("utf-8", "replace")
    return source.format == "dataset" or source.subset is not None or declared


def _loaded_dataset(source: RecordsSource, key: str) -> list[Part]:
    """The Arrow files that the datasets library makes of a hub id or a folder like one; of a
    slice of a split (`train[:10%]`) they are written beside those of the whole, once."""
    datasets = the_library(source.path, key)
    try:
        loaded = datasets.load_dataset(source.path, source.subset, split=source.split)
        files = [Path(file["filename"]) for file in loaded.cache_files]
        if "[" in source.split and files:
            return _sliced(loaded, files[0].parent, source, key)
    except Exception as error:  # its own kinds, those of the hub, of the network, of formats
        raise dataset_failed(source.path, key, error) from error
    stem = f"{source.subset or 'default'}-{source.split}"
    return [
        Part(f"{stem}-{number:05d}", found_file(str(path))) for number, path in enumerate(files)
    ]


def _sliced(loaded: Any, folder: Path, source: RecordsSource, key: str) -> list[Part]:
    """The files of a slice, `folder` being that of the whole dataset in this version."""
    name = sha256(repr([source.subset, source.split]).encode()).hexdigest()[:16]
    saved = folder / f"rostra-{name}"
    if not (saved / "state.json").exists():  # written last
        loaded.save_to_disk(saved)
    return saved_dataset(str(saved), source.split, key)
