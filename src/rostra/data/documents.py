"""The documents of tasks, read and cleaned; and what must be known of all of them first.

Documents are stored as they were read and cleaned where reading them twice would be dearer or
duplicates are to be found; else they go straight from their source into shards.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from rostra.config.data import DataSection
from rostra.data.clean import Cleaner, Rejection, Rejections
from rostra.data.duplicates import Contamination, HashWriter, find_duplicates
from rostra.data.folders import Folder
from rostra.data.items import Item, batches, read_items
from rostra.data.sources import BadRecords
from rostra.data.tasks import Task, Tell, write_record
from rostra.errors import RequestError

STORED = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.large_string()),
        ("sha256", pa.binary(32)),
        ("tokens", pa.large_list(pa.uint32())),  # null where there is text
    ]
)


@dataclass
class Losses:
    """What of a task's input is not kept: bad data, and rejected documents."""

    bad: BadRecords
    rejections: Rejections

    @classmethod
    def of(cls, data: DataSection) -> Losses:
        """Counted in silence: it is said when the task is complete, from its record."""
        return cls(BadRecords(data.on_bad_record, lambda _: None), Rejections())

    def to_json(self) -> dict[str, Any]:
        """As a record has them."""
        return {
            "skipped": {"counts": dict(self.bad.counts), "examples": self.bad.examples},
            "rejections": self.rejections.to_json(),
        }


@dataclass(frozen=True)
class Documents:
    """The documents (or examples) of tasks: from their source, or as they were stored.

    Attributes:
        work: where they are stored, and where it is noted which are dropped as duplicates.
        stored: whether the stage `read` stores them.
    """

    data: DataSection
    work: Folder
    stored: bool

    @cached_property
    def cleaner(self) -> Cleaner:
        return Cleaner.of(self.data.clean, Path.cwd())

    @cached_property
    def contamination(self) -> Contamination | None:
        table = self.data.duplicates.evaluation
        return Contamination.of(table) if table.sets else None

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which documents there are, and what they say: part of the key."""
        table = self.data.duplicates
        return {
            "clean": self.cleaner.identity,
            "evaluation": self.contamination.identity if self.contamination else None,
            "duplicates": None
            if table.find == "none"
            else [table.find, table.ngram, table.bands, table.hashes],
        }

    def items(self, task: Task, losses: Losses) -> Iterator[Item]:
        """The documents of a task that are kept, in their order."""
        return self._stored(task) if self.stored else self.read(task, losses)

    def read(self, task: Task, losses: Losses) -> Iterator[Item]:
        """The clean documents of a task from its source, duplicates among them."""

        def clean(item: Item) -> Item | None:
            return self.clean(item, losses.rejections)

        examples = self.data.examples
        for part in task.parts:
            yield from read_items(task.reader, part, losses.bad, examples, clean)

    def clean(self, item: Item, rejections: Rejections) -> Item | None:
        """The document put right; None if it is rejected. Of examples, which are kept as they
        are, only those that hold an evaluation set's text are rejected."""
        if item.tokens is not None:
            return item
        text: str | Rejection = item.text
        if self.cleaner and item.example is None:
            text = self.cleaner(item.text, json.loads(item.metadata))
        if self.contamination and not isinstance(text, Rejection):
            left, name = self.contamination.apply(text)
            if left is None or (name and item.example):
                text = Rejection("evaluation", str(name))
            else:
                text = left
        if isinstance(text, Rejection):
            rejections.add(item.id, item.text, text)
            return None
        return item if text == item.text else Item.of(item.id, text, item.metadata, item.example)

    def _stored(self, task: Task) -> Iterator[Item]:
        marks = self.work.read(dropped_name(task.number))
        if marks is None and self.data.duplicates.find != "none":
            raise RequestError(f"{self.work.place}: was changed by something else; start again")
        dropped = np.unpackbits(np.frombuffer(marks or b"", np.uint8))
        first = 0
        with self.work.fetch(stored_name(task.number)) as path, pa.memory_map(str(path)) as file:
            for batch in pa.ipc.open_stream(file):
                for row, item in enumerate(_items(batch)):
                    if marks is None or not dropped[first + row]:
                        yield item
                first += batch.num_rows


def _items(batch: pa.RecordBatch) -> Iterator[Item]:
    texts, tokens = batch.column("text"), batch.column("tokens")
    sizes = np.diff(np.frombuffer(texts.buffers()[1], np.int64)).tolist()
    some = tokens.null_count < len(tokens)
    rows = zip(
        batch.column("id").to_pylist(),
        texts.to_pylist(),
        sizes,
        batch.column("sha256").to_pylist(),
        strict=True,
    )
    for row, (id, text, size, sha256) in enumerate(rows):
        item = Item(id, text, size, sha256)
        if some and tokens[row].is_valid:
            item = replace(item, tokens=tokens[row].values.to_numpy())
        yield item


def stored_name(number: int) -> str:
    return f"documents/{number:05d}.arrow"


def hashes_name(number: int) -> str:
    return f"hashes/{number:05d}.arrow"


def dropped_name(number: int) -> str:
    return f"dropped/{number:05d}"


@dataclass
class Read:
    """Reads and cleans the documents of a task, and stores them with what finds duplicates."""

    stage: ClassVar[str] = "read"
    documents: Documents

    @property
    def work(self) -> Folder:
        return self.documents.work

    def __call__(self, task: Task, tell: Tell) -> None:
        documents, losses = self.documents, Losses.of(self.documents.data)
        table, count, size = documents.data.duplicates, 0, 0
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with self.work.scratch() as folder:
            with (
                pa.OSFile(str(folder / "documents"), "wb") as file,
                pa.ipc.new_stream(file, STORED, options=options) as stored,
                HashWriter(folder / "hashes", task.reader.name, table) as hashes,
            ):
                for batch in batches(documents.read(task, losses)):
                    stored.write_batch(_stored_batch(batch))
                    ids, sha256 = [i.id for i in batch], [i.sha256 for i in batch]
                    hashes.add(ids, [i.text for i in batch], sha256)
                    count += len(batch)
                    size += (done := sum(item.size for item in batch))
                    tell(len(batch), done)
            self.work.take(folder / "documents", stored_name(task.number))
            self.work.take(folder / "hashes", hashes_name(task.number))
        record = {"documents": count, "bytes": size, **losses.to_json()}
        write_record(self, task, record)


def _stored_batch(items: Sequence[Item]) -> pa.RecordBatch:
    columns = [
        pa.array([item.id for item in items], pa.string()),
        pa.array([item.text for item in items], pa.large_string()),
        pa.array([item.sha256 for item in items], pa.binary(32)),
        pa.array([item.tokens for item in items], pa.large_list(pa.uint32())),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=STORED)


def drop_duplicates(work: Folder, tasks: Sequence[Task]) -> list[int]:
    """Note, for each task, which of its documents are dropped; how many these are."""
    with contextlib.ExitStack() as open_files:
        paths = [open_files.enter_context(work.fetch(hashes_name(t.number))) for t in tasks]
        found = find_duplicates(paths)
    for task, dropped in zip(tasks, found, strict=True):
        work.write(dropped_name(task.number), np.packbits(dropped).tobytes())
    return [int(dropped.sum()) for dropped in found]
