"""What is to be prepared: the tasks of all sources, the tokenizer, and the key of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rostra import files
from rostra.config.cleaning import CleanTable
from rostra.config.data import DataSection
from rostra.data.cache import ContentHashes, cache_folder, cache_place, digest
from rostra.data.documents import Documents, Losses
from rostra.data.encode import ExampleEncoder
from rostra.data.folders import Folder, LocalFolder, folder_at
from rostra.data.formats import TokensReader
from rostra.data.head import Head, HeadHashes
from rostra.data.prepared import FORMAT
from rostra.data.reading import make_reader
from rostra.data.sources import BadRecords
from rostra.data.tasks import Task, Tell, tasks_of
from rostra.data.tokenizer import RECIPE, Encoder, add_tokens, load_tokenizer, train_tokenizer
from rostra.data.tokenizing import make_encoder
from rostra.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAINED_BYTES = 1 << 30  # of documents, chosen by hash, that a tokenizer is trained on

UNPREPARED = ("path", "weight", "epochs")  # of a source: they change no shard

Notice = Callable[[str], None]


@dataclass
class Job:
    """What is to be prepared, and the key of the result.

    Attributes:
        place: the folder or URL of the result, below `cache`.
        bad: files that could not even be listed.
    """

    data: DataSection
    tasks: list[Task]
    bad: BadRecords
    hashes: ContentHashes
    pretrained: tuple[str, PreTrainedTokenizerFast] | None
    key: str
    cache: str
    documents: Documents

    @classmethod
    def of(cls, data: DataSection, model_tokenizer: str | None, notice: Notice) -> Job:
        """List all parts, hash their content and make the key. See `prepare`; of sources that are
        streamed, only the first documents are to be prepared."""
        pretrained = pretrained_tokenizer(data, model_tokenizer, notice)
        bad = BadRecords(data.on_bad_record, notice)
        head = Head.of(data, bad) if data.streaming else None
        tasks = head.tasks if head else list_tasks(data, bad)
        _check_tokens(tasks, pretrained)
        sources = [source.model_dump() for source in data.sources]
        memo = f"memo-{digest([sources, str(Path.cwd())])[:16]}.json"
        hashes = (HeadHashes if head else ContentHashes)(cache_folder(data) / memo)
        parts = [
            [task.reader.index, part.name, part.start, part.stop, hashes.hash(part)]
            for task in tasks
            for part in task.parts
        ]
        stored = not data.examples and (
            data.duplicates.find != "none" or bool(data.clean != CleanTable() and not pretrained)
        )
        documents = Documents(data, LocalFolder(Path()), stored)
        key = digest(
            {
                "format": FORMAT,
                # A path says nothing of the content; the names and hashes below it do.
                "sources": [{k: v for k, v in s.items() if k not in UNPREPARED} for s in sources],
                "parts": parts,
                "missing": bad.examples,
                "on_bad_record": data.on_bad_record,
                "documents": documents.identity,
                "held_out": data.held_out,
                "task_bytes": data.prepare.task_bytes,
                "shard_tokens": data.prepare.shard_tokens,
                "tokenizer": _tokenizer_key(data, pretrained, bad),
                **({"head": head.identity} if head else {}),
                **({"augment": data.augment.model_dump()} if data.augment.variants > 1 else {}),
            }
        )
        cache = cache_place(data)
        documents = replace(documents, work=folder_at(files.join(cache, f".work-{key[:24]}")))
        return cls(data, tasks, bad, hashes, pretrained, key, cache, documents)

    @property
    def place(self) -> str:
        return files.join(self.cache, self.key[:24])

    @property
    def work(self) -> Folder:
        """Where tasks leave what is not of the result."""
        return self.documents.work

    @property
    def result(self) -> Folder:
        """Where tasks leave what is: on a store, what it says is the result once it has a
        manifest; a local folder gets its place whole."""
        return folder_at(self.place) if files.is_url(self.cache) else self.work.below("result")

    @property
    def bytes(self) -> int:
        return sum(task.size for task in self.tasks)

    @property
    def passes(self) -> int:
        """How often all is read: a tokenizer that is trained here needs a pass of its own."""
        return 1 + self.documents.stored + (self.pretrained is None)

    def tokenizer(self, tell: Tell) -> PreTrainedTokenizerFast:
        """The tokenizer, which may have to be trained first."""
        if self.pretrained:
            return self.pretrained[1]
        data = self.data
        vocabulary = data.tokenizer.vocabulary or 0
        tokenizer = train_tokenizer(self._training_texts(tell), vocabulary)
        if len(tokenizer) < vocabulary:
            self.bad.notice(
                f"the documents gave a vocabulary of {len(tokenizer)} tokens, "
                f"not data.tokenizer.vocabulary: {vocabulary}"
            )
        add_tokens(tokenizer, data.tokenizer)
        return tokenizer

    def _training_texts(self, tell: Tell) -> Iterator[str]:
        # What is bad is announced by the pass that writes.
        losses = Losses.of(self.data)
        share = min(1.0, TRAINED_BYTES / max(1, self.bytes))
        for task in self.tasks:
            for item in self.documents.items(task, losses):
                if not item.is_below(self.data.held_out) and item.is_chosen(share):
                    yield item.text
                tell(1, item.size)

    def encoder(self, tokenizer: PreTrainedTokenizerFast) -> Encoder | ExampleEncoder:
        return make_encoder(tokenizer, self.data, self.bad)


def list_tasks(data: DataSection, bad: BadRecords) -> list[Task]:
    """The tasks of all sources; what cannot be listed goes to `bad`."""
    readers = [
        make_reader(source, index, data.augment) for index, source in enumerate(data.sources)
    ]
    work = ((reader, part) for reader in readers for part in reader.parts(bad))
    return tasks_of(work, data.prepare.task_bytes)


def _check_tokens(
    tasks: list[Task], pretrained: tuple[str, PreTrainedTokenizerFast] | None
) -> None:
    """Whether sources of tokens are of the tokenizer."""
    readers = {task.reader.index: task.reader for task in tasks}.values()
    if given := [reader for reader in readers if isinstance(reader, TokensReader)]:
        hash = Encoder(pretrained[1]).hash if pretrained else None
        for reader in given:
            reader.check_tokenizer(hash)


def _tokenizer_key(
    data: DataSection, pretrained: tuple[str, PreTrainedTokenizerFast] | None, bad: BadRecords
) -> dict[str, Any]:
    """What decides the tokens (and weights) of a text."""
    if pretrained:
        return {"hash": make_encoder(pretrained[1], data, bad).hash}
    trained: dict[str, Any] = {"train": data.tokenizer.vocabulary, "recipe": RECIPE}
    if data.examples or data.tokenizer.special or data.tokenizer.added:
        # What is not of the trained vocabulary is in the hash under any tokenizer.
        smallest = train_tokenizer(iter(()), 257)
        add_tokens(smallest, data.tokenizer)
        trained["encoder"] = make_encoder(smallest, data, bad).hash
    return trained


def pretrained_tokenizer(
    data: DataSection, model_tokenizer: str | None, notice: Notice
) -> tuple[str, PreTrainedTokenizerFast] | None:
    """Name and tokenizer; None when one is to be trained.

    Raises:
        RequestError: when there is none to load, and none is to be trained.
    """
    if data.tokenizer.vocabulary is not None:
        return None
    name = data.tokenizer.pretrained or model_tokenizer
    if name is None:
        raise RequestError(
            "data.tokenizer: there is no tokenizer, as the model is built from scratch. Set "
            "data.tokenizer.vocabulary to train one (8192, say), or data.tokenizer.pretrained "
            "to load one."
        )
    tokenizer = load_tokenizer(name)
    if added := add_tokens(tokenizer, data.tokenizer):
        notice(f"{added:,} tokens were added to the vocabulary of {name}")
    return name, tokenizer
