"""What a config trains on, shown before it does: counts, packing, and tokens one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from rostra.config.data import DataSection
from rostra.config.sources import PreferenceSource
from rostra.data.audit import Audit, show_examples
from rostra.data.clean import Rejections
from rostra.data.documents import Losses
from rostra.data.encode import Encoded, ExampleEncoder
from rostra.data.items import batches
from rostra.data.job import Job, Notice
from rostra.data.loader import Loader, training_samples
from rostra.data.packing import Packed
from rostra.data.prepare import prepare
from rostra.data.prepared import Prepared


@dataclass(frozen=True)
class Inspection:
    """What was found, for JSON, and some examples (or documents) in tokens."""

    facts: dict[str, Any]
    audit: Audit
    shown: list[Encoded]
    tokenizer: PreTrainedTokenizerFast

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
        return {**self.facts, "lengths": self.audit.counts()["lengths"], "shown": shown}

    def show(self, console: Console | None = None) -> None:
        """For people; on standard output if no console is given."""
        console = console or Console()
        table = Table(show_header=False, box=None, pad_edge=False)
        for key, value in self.facts.items():
            table.add_row(key.replace("_", " "), _said(value))
        console.print(table)
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
) -> Inspection:
    """Prepare the data, if it is not, and look at it; `count` examples or documents, and
    samples, are shown. Preference data is read and checked only.

    Raises:
        RequestError: as preparing and packing do.
    """
    if any(isinstance(source, PreferenceSource) for source in data.sources):
        return _read_only(data, model_tokenizer, count, notice)
    prepared = prepare(data, model_tokenizer, notice)
    samples = training_samples(prepared, data, seed, global_batch_size, False, 0, notice)
    loader = Loader(samples, global_batch_size)
    packed = samples if isinstance(samples, Packed) else None
    facts = {
        "kind": "examples" if packed else "documents",
        "path": str(prepared.folder),
        **prepared.manifest["counts"],
        "skipped": prepared.skipped,
        "packing": data.packed,
        "sequence_length": data.sequence_length,
        "samples": len(samples),
        "tokens": samples.tokens,
        "padding": packed.padding(global_batch_size) if packed else 0.0,
        "changed": packed.pieces.changed if packed else {},
        "first_samples": [
            list(loader.locate(place).documents) for place in range(min(count, len(samples)))
        ],
    }
    return Inspection(facts, _counted(prepared), list(_first(prepared, count)), prepared.tokenizer)


def _read_only(
    data: DataSection, model_tokenizer: str | None, count: int, notice: Notice
) -> Inspection:
    job = Job.of(data, model_tokenizer, notice)
    tokenizer = job.tokenizer(lambda *_: None)
    encoder = ExampleEncoder(tokenizer, data, job.bad)
    audit = Audit()
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
            if len(shown) < count:
                shown.append(replace(found, where=f"{verdict}, {found.where}"))
    audit.check()
    for said in audit.notices():
        notice(said)
    facts = {"kind": "preferences", **verdicts, "skipped": dict(job.bad.counts)}
    return Inspection(facts, audit, shown, tokenizer)


def _counted(prepared: Prepared) -> Audit:
    """Counts of what is trained on; of documents every token is a target, but the first."""
    found = Audit()
    for index in range(len(prepared.train)):
        shard = prepared.train[index]
        lengths = np.diff(shard.offsets)
        found.examples += len(lengths)
        found.tokens += len(shard.tokens)
        if shard.weights is None:
            found.targets += len(shard.tokens) - len(lengths)
        else:
            found.targets += int((shard.weights > 0).sum())
        powers = np.ceil(np.log2(np.maximum(1, lengths))).astype(int)
        found.lengths.update((1 << powers).tolist())
    return found


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
