"""From sources to prepared data: read, split by hash, tokenize, write shards, commit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerFast

from rostra.config.data import DataSection
from rostra.config.sources import PreferenceSource
from rostra.data.audit import Audit
from rostra.data.cache import one_at_a_time
from rostra.data.encode import ExampleEncoder
from rostra.data.job import Job, Notice
from rostra.data.prepared import FORMAT, TOKENIZER, Prepared, open_prepared, seal
from rostra.data.reading import Item, Progress, batches
from rostra.data.shards import SPLITS, Split
from rostra.data.tokenizer import Encoder
from rostra.data.writer import ShardWriter
from rostra.errors import RequestError
from rostra.store import commit_folder, sweep

Writers = dict[Split, ShardWriter]


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
    _check_trainable(data)
    job = Job.of(data, model_tokenizer, notice)
    prepared = open_prepared(job.folder)
    if prepared is None:
        prepared = _prepare_alone(job, notice, progress)
    elif prepared.skipped:
        said = ", ".join(f"{count} {reason}" for reason, count in prepared.skipped.items())
        notice(f"skipped when this data was prepared: {said} (named in {prepared.folder})")
    progress(1.0)
    job.hashes.save()
    for said in prepared.audit.get("notices", ()):
        notice(said)
    _check_length(prepared.train.documents, prepared.train.tokens, data)
    if data.held_out and not prepared.held_out.documents:
        kind = "example" if data.examples else "document"
        notice(f"no {kind} was held out: data.held_out is {data.held_out:g} of too few {kind}s")
    return prepared


def _prepare_alone(job: Job, notice: Notice, progress: Progress) -> Prepared:
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


def _write(job: Job, progress: Progress) -> None:
    data = job.data
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns, once we fork
    manifest: dict[str, Any] = {}  # filled in when all is counted, written on leaving
    with commit_folder(job.folder, prepared=manifest) as aside:
        tokenizer = job.tokenizer(_pass(progress, 0, job.passes))
        encoder = job.encoder(tokenizer)
        held_text = not data.examples
        size = data.prepare.shard_tokens
        writers: Writers = {
            split: ShardWriter(aside, split, encoder.dtype, size, held_text and split == "held_out")
            for split in SPLITS
        }
        items = batches(job.items(job.bad, _pass(progress, job.passes - 1, job.passes)))
        if isinstance(encoder, ExampleEncoder):
            audit = _write_examples(encoder, items, writers, data.held_out)
        else:
            audit = _write_documents(encoder, items, writers, data.held_out)
        for writer in writers.values():
            writer.close()
        job.hashes.check_unchanged()
        manifest.update(seal({**_manifest(job, tokenizer, encoder, writers), **audit}))
        train = writers["train"].closed
        _check_length(sum(s.documents for s in train), sum(s.tokens for s in train), data)
        if isinstance(encoder, ExampleEncoder) and encoder.template:
            tokenizer.chat_template = encoder.template.text  # what the model is tuned to
        tokenizer.save_pretrained(aside / TOKENIZER)


def _write_documents(
    encoder: Encoder, items: Iterator[list[Item]], writers: Writers, held_out: float
) -> dict[str, Any]:
    for batch in items:
        texts = [item.text for item in batch]
        for item, tokens in zip(batch, encoder.encode(texts), strict=True):
            writers[item.split(held_out)].add(item.id, item.text, tokens, item.size)
    return {}


def _write_examples(
    encoder: ExampleEncoder, items: Iterator[list[Item]], writers: Writers, held_out: float
) -> dict[str, Any]:
    """What the manifest says of the label audit.

    Raises:
        RequestError: when the audit finds that no end is ever trained.
    """
    audits = {split: Audit() for split in SPLITS}
    for batch in items:
        splits = {item.id: item.split(held_out) for item in batch}
        for found in encoder.encode([item.example for item in batch if item.example]):
            split = splits[found.id]
            writers[split].add(found.id, "", found.tokens, found.text_bytes, found.weights)
            audits[split].add(found)
    if audits["train"].examples:  # else there is more to say than that
        audits["train"].check()
    counts = {split: audit.counts() for split, audit in audits.items()}
    return {"audit": {**counts, "notices": audits["train"].notices()}}


def _manifest(
    job: Job,
    tokenizer: PreTrainedTokenizerFast,
    encoder: Encoder | ExampleEncoder,
    writers: Writers,
) -> dict[str, Any]:
    plain = encoder if isinstance(encoder, Encoder) else Encoder(tokenizer)
    shards = {split: writer.closed for split, writer in writers.items()}
    return {
        "format": FORMAT,
        "key": job.key,
        "counts": {
            split: {
                ("examples" if job.data.examples else "documents"): sum(
                    shard.documents for shard in closed
                ),
                "tokens": sum(shard.tokens for shard in closed),
                "bytes": sum(shard.bytes for shard in closed),
            }
            for split, closed in shards.items()
        },
        "skipped": {"counts": dict(job.bad.counts), "examples": job.bad.examples},
        "tokenizer": {
            "hash": plain.hash,  # of the tokenizer alone, however examples are encoded
            "vocabulary_size": encoder.vocabulary_size,
            "pretrained": job.pretrained[0] if job.pretrained else None,
        },
        "dtype": encoder.dtype.__name__,
        "sources": [source.model_dump() for source in job.data.sources],
        "shards": {split: [vars(shard) for shard in closed] for split, closed in shards.items()},
    }


def _pass(progress: Progress, done: int, passes: int) -> Progress:
    """Progress of one pass out of several."""
    return lambda share: progress((done + share) / passes)


def _check_trainable(data: DataSection) -> None:
    for index, source in enumerate(data.sources):
        if isinstance(source, PreferenceSource):
            raise RequestError(
                f"data.sources.{index}: preference data is not trained on yet; `rostra inspect` "
                "checks and shows it. Take this source out to train on the others."
            )


def _check_length(documents: int, tokens: int, data: DataSection) -> None:
    if data.examples:
        if not documents:
            raise RequestError(
                "data.sources: there is no example to train on. Add records, or lower "
                f"data.held_out ({data.held_out:g})."
            )
        return
    needed = data.sequence_length + 1
    if tokens < needed:
        raise RequestError(
            f"the corpus has {tokens:,} training tokens, and one sample needs {needed:,} "
            f"(data.sequence_length {data.sequence_length} and the token after it). Add text to "
            "data.sources, or lower data.sequence_length or data.held_out."
        )
