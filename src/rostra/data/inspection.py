"""What a config trains on, shown before it does: counts, packing, and tokens one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rostra.config.data import DataSection
from rostra.config.sources import PreferenceSource
from rostra.data.audit import Audit, show_examples
from rostra.data.clean import Rejections
from rostra.data.documents import Losses
from rostra.data.encode import Encoded, ExampleEncoder
from rostra.data.items import batches
from rostra.data.job import Job, Notice, list_tasks, pretrained_tokenizer
from rostra.data.loader import Loader, training_samples
from rostra.data.packing import Packed
from rostra.data.prepare import prepare
from rostra.data.prepared import Prepared
from rostra.data.preview import Lengths, Sample, encoded
from rostra.data.sources import BadRecords
from rostra.data.tokenizer import add_tokens, train_tokenizer
from rostra.data.tokenizing import make_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Of sources: what is more than this is not prepared only to be looked at.
PREPARED_BYTES = 64 << 20


@dataclass(frozen=True)
class Inspection:
    """What was found, for JSON, and some examples (or documents) in tokens.

    Attributes:
        audit: of all that `lengths` are of: what is trained on, or only the sample of it.
        sample: what the filters decide; None of preferences.
    """

    facts: dict[str, Any]
    audit: Audit
    shown: list[Encoded]
    tokenizer: PreTrainedTokenizerFast
    lengths: Lengths
    sample: Sample | None = None

    def to_dict(self) -> dict[str, Any]:
        shown = [
            {
                "id": one.id,
                "text": self.tokenizer.decode(one.tokens.tolist()),
                "tokens": one.tokens.tolist(),
                "weights": one.weights.tolist(),
            }
            for one in self.shown
        ]
        return {
            **self.facts,
            "statistics": self.lengths.to_json(),
            "lengths": self.audit.counts()["lengths"],
            "sample": self.sample.to_json() if self.sample else None,
            "shown": shown,
        }

    def show(self, console: Console | None = None) -> None:
        """For people; on standard output if no console is given."""
        console = console or Console()
        table = Table(show_header=False, box=None, pad_edge=False)
        for key, value in self.facts.items():
            table.add_row(key.replace("_", " "), _said(value))
        console.print(table)
        if self.sample:
            self.sample.show(console, max(1, len(self.shown)))
        self.lengths.show(console)
        self.audit.show(console)
        if self.shown:
            show_examples(console, self.shown, self.tokenizer, len(self.shown))


def inspect_data(
    data: DataSection,
    model_tokenizer: str | None,
    seed: int,
    global_batch_size: int,
    count: int,
    notice: Notice,
    documents: int = 300,
    full: bool = False,
) -> Inspection:
    """What the filters decide of a sample of so many `documents`; how long documents are; and
    how they are packed, for which all is prepared, if it is not and is little. `count` examples
    or documents, and samples, are shown. Preference data is read and checked only.

    Args:
        full: prepare also what is large.

    Raises:
        RequestError: as reading, cleaning, preparing and packing do.
    """
    if any(isinstance(source, PreferenceSource) for source in data.sources):
        return _read_only(data, model_tokenizer, count, notice)
    if not full and not data.streaming and (size := _bytes(data)) > PREPARED_BYTES:
        return _sampled(data, model_tokenizer, size, count, notice, documents)
    prepared = prepare(data, model_tokenizer, notice)
    # What is skipped of it was told by preparing.
    sample = Sample.of(data, documents, BadRecords(data.on_bad_record, lambda _: None))
    samples = training_samples(prepared, data, seed, global_batch_size, False, 0, notice)
    loader = Loader(samples, global_batch_size)
    packed = samples if isinstance(samples, Packed) else None
    facts = {
        **_kind(data),
        "path": str(prepared.folder),
        **prepared.manifest["counts"],
        "skipped": prepared.skipped,
        "samples": len(samples),
        "tokens": samples.tokens,
        "padding": packed.padding(global_batch_size) if packed else 0.0,
        "changed": packed.pieces.changed if packed else {},
        "first_samples": [
            list(loader.locate(place).documents) for place in range(min(count, len(samples)))
        ],
    }
    audit, lengths = _counted(prepared, _limit(data))
    shown = list(_first(prepared, count))
    return Inspection(facts, audit, shown, prepared.tokenizer, lengths, sample)


def _kind(data: DataSection) -> dict[str, Any]:
    return {
        "kind": "examples" if data.examples else "documents",
        "packing": data.packed,
        "sequence_length": data.sequence_length,
    }


def _limit(data: DataSection) -> int | None:
    """Where examples are too long; documents may be of any length."""
    return data.sequence_length if data.examples else None


def _bytes(data: DataSection) -> int:
    """Of all sources, as they are listed."""
    return sum(task.size for task in list_tasks(data, BadRecords("skip", lambda _: None)))


def _sampled(
    data: DataSection,
    model_tokenizer: str | None,
    size: int,
    count: int,
    notice: Notice,
    documents: int,
) -> Inspection:
    """What a sample alone shows; a tokenizer that is to be trained is trained on it."""
    pretrained = pretrained_tokenizer(data, model_tokenizer, notice)
    bad = BadRecords(data.on_bad_record, notice)
    sample = Sample.of(data, documents, bad)
    if pretrained:
        tokenizer = pretrained[1]
    else:
        notice("the tokenizer of these figures is trained on the sample alone")
        texts = (item.text for item in sample.items)
        tokenizer = train_tokenizer(texts, data.tokenizer.vocabulary or 0)
        add_tokens(tokenizer, data.tokenizer)
    notice(
        f"only the first {len(sample.decisions):,} documents are looked at; --full prepares all, "
        f"and shows counts and packing"
    )
    found = encoded(sample.items, make_encoder(tokenizer, data, bad))
    audit = Audit()
    for one in found:
        audit.add(one)
    facts = {**_kind(data), "bytes": size, "skipped": dict(bad.counts)}
    lengths = Lengths.of(found, _limit(data))
    return Inspection(facts, audit, found[:count], tokenizer, lengths, sample)


def _read_only(
    data: DataSection, model_tokenizer: str | None, count: int, notice: Notice
) -> Inspection:
    job = Job.of(data, model_tokenizer, notice)
    tokenizer = job.tokenizer(lambda *_: None)
    encoder = ExampleEncoder(tokenizer, data, job.bad)
    audit = Audit()
    sizes, text_bytes = list[int](), 0
    shown: list[Encoded] = []
    verdicts: Counter[str] = Counter()
    losses = Losses(job.bad, Rejections())
    items = (item for task in job.tasks for item in job.documents.items(task, losses))
    for batch in batches(items):
        examples = {item.id: item.example for item in batch if item.example}
        for found in encoder.encode(list(examples.values())):
            verdict = examples[found.id].verdict or "no verdict"
            verdicts[verdict] += 1
            audit.add(found)
            sizes.append(len(found.tokens))
            text_bytes += found.text_bytes
            if len(shown) < count:
                shown.append(replace(found, where=f"{verdict}, {found.where}"))
    audit.check()
    for said in audit.notices():
        notice(said)
    facts = {"kind": "preferences", **verdicts, "skipped": dict(job.bad.counts)}
    lengths = Lengths(np.array(sizes, np.int64), text_bytes, _limit(data))
    return Inspection(facts, audit, shown, tokenizer, lengths)


def _counted(prepared: Prepared, limit: int | None) -> tuple[Audit, Lengths]:
    """Counts of what is trained on; of documents every token is a target, but the first."""
    found, sizes = Audit(), [np.zeros(0, np.int64)]
    for index in range(len(prepared.train)):
        shard = prepared.train[index]
        lengths = np.diff(shard.offsets)
        sizes.append(lengths)
        found.examples += len(lengths)
        found.tokens += len(shard.tokens)
        if shard.weights is None:
            found.targets += len(shard.tokens) - len(lengths)
        else:
            found.targets += int((shard.weights > 0).sum())
        powers = np.ceil(np.log2(np.maximum(1, lengths))).astype(int)
        found.lengths.update((1 << powers).tolist())
    return found, Lengths(np.concatenate(sizes), prepared.train.bytes, limit)


def _first(prepared: Prepared, count: int) -> Iterator[Encoded]:
    """The first that are trained on, in the order of their sources."""
    for index in range(len(prepared.train)):
        shard = prepared.train[index]
        for row in range(min(count, len(shard.offsets) - 1)):
            here = slice(int(shard.offsets[row]), int(shard.offsets[row + 1]))
            tokens, id = np.asarray(shard.tokens[here]), shard.id(row)
            weights = np.ones(len(tokens), np.float32)
            weights[:1] = 0
            if shard.weights is not None:
                weights = np.asarray(shard.weights[here])
            size = shard.batch.column("bytes")[row].as_py()
            yield Encoded(id, id, tokens, weights, size)
            count -= 1


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_said(count)} {what}" for what, count in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(f"{len(ids)}: {', '.join(ids)}" for ids in value)
    if isinstance(value, float):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else str(value)
