"""Tokenizing: the documents of a task into its shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rostra.config.data import DataSection
from rostra.data.audit import Audit
from rostra.data.documents import Documents, Losses
from rostra.data.encode import Encoded, ExampleEncoder
from rostra.data.examples import Example, ExampleReader
from rostra.data.folders import Folder, read_json
from rostra.data.items import Item, batches
from rostra.data.prepared import TOKENIZER
from rostra.data.shards import SPLITS, variant_split
from rostra.data.sources import BadRecords
from rostra.data.tasks import Task, Tell, write_record
from rostra.data.tokenizer import Encoder, load_tokenizer
from rostra.data.writer import ShardWriter
from rostra.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_RECORD = f"{TOKENIZER}.json"

Writers = dict[str, ShardWriter]  # by split, or variant of the training split


@dataclass
class Tokenize:
    """Tokenizes the documents of a task and writes its shards.

    Attributes:
        result: where shards go, and where the tokenizer is.
        tokenizer: the one that is there; other processes load it by themselves.
    """

    stage: ClassVar[str] = "tokenized"
    documents: Documents
    result: Folder
    tokenizer: PreTrainedTokenizerFast | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"documents": self.documents, "result": self.result, "tokenizer": None}

    @property
    def work(self) -> Folder:
        return self.documents.work

    @cached_property
    def encoder(self) -> Encoder | ExampleEncoder:
        tokenizer = self.tokenizer or fetched_tokenizer(self.work, self.result)
        return make_encoder(tokenizer, self.documents.data, BadRecords("fail", lambda _: None))

    def __call__(self, task: Task, tell: Tell) -> None:
        data, losses = self.documents.data, Losses.of(self.documents.data)
        with self.work.scratch() as folder:
            count = task.reader.variants if isinstance(task.reader, ExampleReader) else 1
            splits = [*SPLITS, *map(variant_split, range(1, count))]
            writers = {split: self._writer(folder, split, task) for split in splits}
            items = _told(self.documents.items(task, losses), tell)
            if isinstance(self.encoder, ExampleEncoder):
                self.encoder.bad = losses.bad
                more = _write_examples(self.encoder, items, writers, data.held_out)
            else:
                more = _write_documents(self.encoder, items, writers, task, data.held_out)
            files: dict[str, Any] = {}
            for writer in writers.values():
                writer.close()
                for shard in writer.closed:
                    files[shard.file] = self.result.take(folder / shard.file, shard.file)
        shards = {split: [vars(s) for s in writer.closed] for split, writer in writers.items()}
        every = [shard for split in SPLITS for shard in writers[split].closed]
        counts = {
            "documents": sum(shard.documents for shard in every),
            "bytes": sum(shard.bytes for shard in every),
        }
        record = {**counts, "shards": shards, "files": files, **losses.to_json(), **more}
        write_record(self, task, record)

    def _writer(self, folder: Path, split: str, task: Task) -> ShardWriter:
        data = self.documents.data
        return ShardWriter(
            folder,
            split,
            self.encoder.dtype,
            data.prepare.shard_tokens,
            keep_text=split == "held_out" and not data.examples,
            task=task.number,
            source=task.reader.index,
        )


def _write_documents(
    encoder: Encoder, items: Iterable[list[Item]], writers: Writers, task: Task, held_out: float
) -> dict[str, Any]:
    for batch in items:
        given = (item for item in batch if item.tokens is not None)
        taken = iter(encoder.take([_checked(item, encoder, task) for item in given]))
        made = iter(encoder.encode([item.text for item in batch if item.tokens is None]))
        for item in batch:
            writer = writers[item.split(held_out)]
            if item.tokens is None:
                writer.add(item.id, item.text, next(made), item.size)
            else:
                tokens, text = next(taken)
                writer.add(item.id, text, tokens, len(text.encode()))
    return {}


def _checked(item: Item, encoder: Encoder, task: Task) -> NDArray[np.uint32]:
    """Tokens of another's making."""
    tokens = item.tokens
    assert tokens is not None
    if len(tokens) and (highest := int(tokens.max())) >= encoder.vocabulary_size:
        raise RequestError(
            f"{task.reader.key}: document {item.id} holds token {highest}; the vocabulary has 0 "
            f"to {encoder.vocabulary_size - 1}. Name the tokenizer that it was made with "
            "(data.tokenizer.pretrained)."
        )
    return tokens


def _write_examples(
    encoder: ExampleEncoder, items: Iterable[list[Item]], writers: Writers, held_out: float
) -> dict[str, Any]:
    """What the record says of the label audit."""
    audits = {split: Audit() for split in SPLITS}
    for batch in items:
        splits = {item.id: item.split(held_out) for item in batch}
        examples = [item.example for item in batch if item.example]
        trained = set()
        for found in encoder.encode(examples):
            split = splits[found.id]
            _add(found, writers[split])
            audits[split].add(found)
            if split == "train":
                trained.add(found.id)
        _write_variants(encoder, [e for e in examples if e.id in trained], writers)
    return {"audits": {split: vars(audit) for split, audit in audits.items()}}


def _write_variants(encoder: ExampleEncoder, examples: list[Example], writers: Writers) -> None:
    """The further variants of examples that are trained on, each variant a run of its own."""
    for number in range(1, 1 + max((len(e.variants) for e in examples), default=0)):
        variants = [
            replace(e, id=f"{e.id}:v{number}", content=e.variants[number - 1]) for e in examples
        ]
        for found in encoder.encode(variants):
            _add(found, writers[variant_split(number)])


def _add(found: Encoded, writer: ShardWriter) -> None:
    writer.add(found.id, "", found.tokens, found.text_bytes, found.weights)


def make_encoder(
    tokenizer: PreTrainedTokenizerFast, data: DataSection, bad: BadRecords
) -> Encoder | ExampleEncoder:
    """For examples, or for documents."""
    return ExampleEncoder(tokenizer, data, bad) if data.examples else Encoder(tokenizer)


def fetched_tokenizer(work: Folder, result: Folder) -> PreTrainedTokenizerFast:
    """The one that was saved before tokenizing began."""
    record = read_json(work, TOKENIZER_RECORD)
    if record is None:
        raise RequestError(f"{work.place}: there is no tokenizer yet; start the command again")
    with work.scratch() as folder, contextlib.ExitStack() as open_files:
        for name in record["files"]:
            fetched = open_files.enter_context(result.fetch(name))
            (folder / Path(name).name).write_bytes(fetched.read_bytes())
        return load_tokenizer(folder)


def _told(items: Iterator[Item], tell: Tell) -> Iterator[list[Item]]:
    """Items in batches; told when a batch is done with."""
    for batch in batches(items):
        yield batch
        tell(len(batch), sum(item.size for item in batch))
