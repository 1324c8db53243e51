"""From sources to prepared data: read, split by hash, tokenize, write shards, commit."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from rostra.config.schema import DataSection
from rostra.config.sources import (
    GutenbergSource,
    JsonlSource,
    PythonDocsSource,
    Source,
    TextSource,
)
from rostra.data.cache import ContentHashes, cache_folder, digest, one_at_a_time
from rostra.data.gutenberg import GutenbergReader
from rostra.data.prepared import FORMAT, TOKENIZER, Prepared, open_prepared, seal
from rostra.data.python_docs import PythonDocsReader
from rostra.data.shards import SPLITS, ShardWriter
from rostra.data.sources import BadRecords, JsonlReader, Part, Reader, TextReader
from rostra.data.tokenizer import RECIPE, Encoder, load_tokenizer, train_tokenizer
from rostra.errors import RequestError
from rostra.store import commit_folder, sweep

ENCODED_DOCUMENTS = 1024  # tokenized at once, at the most
ENCODED_BYTES = 4_194_304
TRAINED_BYTES = 1 << 30  # of documents, chosen by hash, that a tokenizer is trained on

Notice = Callable[[str], None]
Progress = Callable[[float], None]


def make_reader(source: Source, index: int) -> Reader:
    """The reader of `data.sources[index]`."""
    match source:
        case TextSource():
            return TextReader(index, source)
        case JsonlSource():
            return JsonlReader(index, source)
        case GutenbergSource():
            return GutenbergReader(index, source)
        case PythonDocsSource():
            return PythonDocsReader(index, source)


def prepare(
    data: DataSection,
    model_tokenizer: str | None,
    notice: Notice,
    progress: Progress | None = None,
) -> Prepared:
    """The prepared data that `data` asks for: from the cache, or made now.

    Args:
        model_tokenizer: folder or hub id of the pretrained model, whose tokenizer is taken
            when `data.tokenizer` names none.
        notice: told what a person should know.
        progress: told the share that is done, from 0 to 1.

    Raises:
        RequestError: for missing or bad input, too little of it, or a full disk; nothing is
            left behind.
    """
    progress = progress or (lambda _: None)
    job = _Job.of(data, model_tokenizer, notice)
    prepared = open_prepared(job.folder)
    if prepared is None:
        prepared = _prepare_alone(job, notice, progress)
    elif prepared.skipped:
        said = ", ".join(f"{count} {reason}" for reason, count in prepared.skipped.items())
        notice(f"skipped when this data was prepared: {said} (named in {prepared.folder})")
    progress(1.0)
    job.hashes.save()
    _check_length(prepared.train.tokens, data)
    if data.held_out and not prepared.held_out.documents:
        notice(f"no document was held out: data.held_out is {data.held_out:g} of too few documents")
    return prepared


@dataclass
class _Job:
    """What is to be prepared, and the key of the result."""

    data: DataSection
    work: list[tuple[Reader, Part]]
    bad: BadRecords
    hashes: ContentHashes
    pretrained: tuple[str, PreTrainedTokenizerFast] | None
    key: str
    folder: Path

    @classmethod
    def of(cls, data: DataSection, model_tokenizer: str | None, notice: Notice) -> _Job:
        """List all parts, hash their content and make the key."""
        cache = cache_folder(data)
        pretrained = _pretrained(data, model_tokenizer)
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
                "tokenizer": {"hash": Encoder(pretrained[1]).hash}
                if pretrained
                else {"train": data.tokenizer.vocabulary, "recipe": RECIPE},
            }
        )
        return cls(data, work, bad, hashes, pretrained, key, cache / key[:24])


def _pretrained(
    data: DataSection, model_tokenizer: str | None
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
    return name, load_tokenizer(name)


def _prepare_alone(job: _Job, notice: Notice, progress: Progress) -> Prepared:
    """Prepare, unless another process does just that: then take what it made."""

    def waiting() -> None:
        notice("another process is preparing the same data; waiting for it")

    cache = job.folder.parent
    try:
        with one_at_a_time(cache / f".{job.key[:24]}.lock", waiting):
            sweep(cache)
            if (prepared := open_prepared(job.folder)) is None:
                if job.folder.exists():
                    notice(f"{job.folder} is broken or of another version; preparing it anew")
                _write(job, progress)
                prepared = open_prepared(job.folder)
    except BaseException:
        with contextlib.suppress(OSError):
            cache.rmdir()  # if it is ours and empty
        raise
    if prepared is None:
        raise RequestError(f"{job.folder}: was changed by something else; start again")
    return prepared


def _write(job: _Job, progress: Progress) -> None:
    data = job.data
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns, once we fork
    manifest: dict[str, Any] = {}  # filled in when all is counted, written on leaving
    with commit_folder(job.folder, prepared=manifest) as aside:
        tokenizer, passes = _tokenizer(job, progress)
        encoder = Encoder(tokenizer)
        writers = {
            split: ShardWriter(
                aside, split, encoder.dtype, data.prepare.shard_tokens, split == "held_out"
            )
            for split in SPLITS
        }
        documents = _documents(job, job.bad, _share(progress, passes - 1, passes))
        for batch in _batches(documents):
            for document, tokens in zip(
                batch, encoder.encode([d.text for d in batch]), strict=True
            ):
                writer = writers["held_out" if document.is_below(data.held_out) else "train"]
                writer.add(document.id, document.text, tokens, document.size)
        for writer in writers.values():
            writer.close()
        job.hashes.check_unchanged()
        tokenizer.save_pretrained(aside / TOKENIZER)
        manifest.update(seal(_manifest(job, encoder, writers)))
        _check_length(manifest["counts"]["train"]["tokens"], data)


def _tokenizer(job: _Job, progress: Progress) -> tuple[PreTrainedTokenizerFast, int]:
    """The tokenizer, and how many passes over the documents there are in all."""
    if job.pretrained:
        return job.pretrained[1], 1
    data = job.data
    vocabulary = data.tokenizer.vocabulary or 0
    # What is bad is announced by the pass that writes.
    unheard = BadRecords(data.on_bad_record, lambda _: None)
    size = sum(fingerprint[0] for _, fingerprint in job.hashes.fingerprints if fingerprint)
    share = min(1.0, TRAINED_BYTES / max(1, size))
    texts = (
        document.text
        for document in _documents(job, unheard, _share(progress, 0, 2))
        if not document.is_below(data.held_out) and document.is_chosen(share)
    )
    tokenizer = train_tokenizer(texts, vocabulary)
    if len(tokenizer) < vocabulary:
        job.bad.notice(
            f"the documents gave a vocabulary of {len(tokenizer)} tokens, "
            f"not data.tokenizer.vocabulary: {vocabulary}"
        )
    return tokenizer, 2


def _manifest(job: _Job, encoder: Encoder, writers: dict[Any, ShardWriter]) -> dict[str, Any]:
    shards = {split: writer.closed for split, writer in writers.items()}
    return {
        "format": FORMAT,
        "key": job.key,
        "counts": {
            split: {
                "documents": sum(shard.documents for shard in closed),
                "tokens": sum(shard.tokens for shard in closed),
                "bytes": sum(shard.bytes for shard in closed),
            }
            for split, closed in shards.items()
        },
        "skipped": {"counts": dict(job.bad.counts), "examples": job.bad.examples},
        "tokenizer": {
            "hash": encoder.hash,
            "vocabulary_size": encoder.vocabulary_size,
            "pretrained": job.pretrained[0] if job.pretrained else None,
        },
        "dtype": encoder.dtype.__name__,
        "sources": [source.model_dump() for source in job.data.sources],
        "shards": {split: [vars(shard) for shard in closed] for split, closed in shards.items()},
    }


@dataclass(frozen=True)
class _Text:
    id: str
    text: str
    size: int  # bytes in UTF-8
    sha256: bytes

    def is_below(self, share: float) -> bool:
        """Whether the text's hash, as a fraction, is below `share`; equal texts agree."""
        return int.from_bytes(self.sha256) < int(share * 2**256)

    def is_chosen(self, share: float) -> bool:
        """The like from the hash's other end, so that the two choices are independent."""
        return int.from_bytes(self.sha256, "little") < int(share * 2**256)


def _documents(job: _Job, bad: BadRecords, progress: Progress) -> Iterator[_Text]:
    """All documents, streamed."""
    sizes = [fingerprint[0] if fingerprint else 0 for _, fingerprint in job.hashes.fingerprints]
    total, before = max(1, sum(sizes)), 0
    for (reader, part), size in zip(job.work, sizes, strict=True):
        read = 0
        for batch in reader.read(part, bad):
            for id, text in zip(batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True):
                encoded = text.encode()
                yield _Text(id, text, len(encoded), hashlib.sha256(encoded).digest())
                read += len(encoded)
            progress((before + min(read, size)) / total)
        before += size
    progress(1.0)


def _batches(documents: Iterator[_Text]) -> Iterator[list[_Text]]:
    """Documents grouped for the tokenizer, which works on several at once."""
    batch: list[_Text] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size
        if len(batch) == ENCODED_DOCUMENTS or size >= ENCODED_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _share(progress: Progress, done: int, passes: int) -> Progress:
    """Progress of one pass out of several."""
    return lambda share: progress((done + share) / passes)


def _check_length(tokens: int, data: DataSection) -> None:
    needed = data.sequence_length + 1
    if tokens < needed:
        raise RequestError(
            f"the corpus has {tokens:,} training tokens, and one sample needs {needed:,} "
            f"(data.sequence_length {data.sequence_length} and the token after it). Add text to "
            "data.sources, or lower data.sequence_length or data.held_out."
        )
