"""What is to be prepared: all parts of all sources, the tokenizer, and the key of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from rostra.config.data import DataSection
from rostra.data.cache import ContentHashes, cache_folder, digest
from rostra.data.encode import ExampleEncoder
from rostra.data.examples import ExampleReader
from rostra.data.prepared import FORMAT
from rostra.data.reading import Item, Progress, make_reader, read_items
from rostra.data.sources import BadRecords, Part, Reader
from rostra.data.tokenizer import RECIPE, Encoder, add_tokens, load_tokenizer, train_tokenizer
from rostra.errors import RequestError

TRAINED_BYTES = 1 << 30  # of documents, chosen by hash, that a tokenizer is trained on

Notice = Callable[[str], None]


@dataclass
class Job:
    """What is to be prepared, and the key of the result."""

    data: DataSection
    work: list[tuple[Reader | ExampleReader, Part]]
    bad: BadRecords
    hashes: ContentHashes
    pretrained: tuple[str, PreTrainedTokenizerFast] | None
    key: str
    folder: Path

    @classmethod
    def of(cls, data: DataSection, model_tokenizer: str | None, notice: Notice) -> Job:
        """List all parts, hash their content and make the key. See `prepare`."""
        cache = cache_folder(data)
        pretrained = _pretrained(data, model_tokenizer, notice)
        bad = BadRecords(data.on_bad_record, notice)
        readers = [make_reader(source, index) for index, source in enumerate(data.sources)]
        work = [(reader, part) for reader in readers for part in reader.parts(bad)]
        sources = [source.model_dump() for source in data.sources]
        hashes = ContentHashes(cache / f"memo-{digest([sources, str(Path.cwd())])[:16]}.json")
        key = digest(
            {
                "format": FORMAT,
                # A path says nothing of the content; the names and hashes below it do.
                "sources": [{k: v for k, v in s.items() if k != "path"} for s in sources],
                "parts": [[reader.index, part.name, hashes.hash(part)] for reader, part in work],
                "missing": bad.examples,
                "on_bad_record": data.on_bad_record,
                "held_out": data.held_out,
                "shard_tokens": data.prepare.shard_tokens,
                "tokenizer": _tokenizer_key(data, pretrained, bad),
            }
        )
        return cls(data, work, bad, hashes, pretrained, key, cache / key[:24])

    @property
    def passes(self) -> int:
        """How often all is read: a tokenizer that is trained here needs a pass of its own."""
        return 1 if self.pretrained else 2

    def items(self, bad: BadRecords, progress: Progress) -> Iterator[Item]:
        """All documents or examples, streamed."""
        return read_items(self.work, self._sizes, bad, self.data.examples, progress)

    @property
    def _sizes(self) -> list[int]:
        return [found[0] if found else 0 for _, found in self.hashes.fingerprints]

    def tokenizer(self, progress: Progress) -> PreTrainedTokenizerFast:
        """The tokenizer, which may have to be trained first."""
        if self.pretrained:
            return self.pretrained[1]
        data = self.data
        vocabulary = data.tokenizer.vocabulary or 0
        # What is bad is announced by the pass that writes.
        unheard = BadRecords(data.on_bad_record, lambda _: None)
        share = min(1.0, TRAINED_BYTES / max(1, sum(self._sizes)))
        texts = (
            item.text
            for item in self.items(unheard, progress)
            if not item.is_below(data.held_out) and item.is_chosen(share)
        )
        tokenizer = train_tokenizer(texts, vocabulary)
        if len(tokenizer) < vocabulary:
            self.bad.notice(
                f"the documents gave a vocabulary of {len(tokenizer)} tokens, "
                f"not data.tokenizer.vocabulary: {vocabulary}"
            )
        add_tokens(tokenizer, data.tokenizer)
        return tokenizer

    def encoder(self, tokenizer: PreTrainedTokenizerFast) -> Encoder | ExampleEncoder:
        return _encoder(tokenizer, self.data, self.bad)


def _encoder(
    tokenizer: PreTrainedTokenizerFast, data: DataSection, bad: BadRecords
) -> Encoder | ExampleEncoder:
    return ExampleEncoder(tokenizer, data, bad) if data.examples else Encoder(tokenizer)


def _tokenizer_key(
    data: DataSection, pretrained: tuple[str, PreTrainedTokenizerFast] | None, bad: BadRecords
) -> dict[str, Any]:
    """What decides the tokens (and weights) of a text."""
    if pretrained:
        return {"hash": _encoder(pretrained[1], data, bad).hash}
    trained: dict[str, Any] = {"train": data.tokenizer.vocabulary, "recipe": RECIPE}
    if data.examples or data.tokenizer.special or data.tokenizer.added:
        # What is not of the trained vocabulary is in the hash under any tokenizer.
        smallest = train_tokenizer(iter(()), 257)
        add_tokens(smallest, data.tokenizer)
        trained["encoder"] = _encoder(smallest, data, bad).hash
    return trained


def _pretrained(
    data: DataSection, model_tokenizer: str | None, notice: Notice
) -> tuple[str, PreTrainedTokenizerFast] | None:
    """Name and tokenizer; None when one is to be trained."""
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
