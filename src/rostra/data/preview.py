"""A sample of documents before anything is prepared: what the filters decide of each, and how
long documents are in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rostra.config.data import DataSection
from rostra.data.clean import Rejections
from rostra.data.documents import Documents
from rostra.data.encode import Encoded, ExampleEncoder
from rostra.data.examples import ExampleReader
from rostra.data.folders import LocalFolder
from rostra.data.items import Item, as_example, read_items
from rostra.data.reading import make_reader
from rostra.data.sources import BadRecords, Part, Reader
from rostra.data.tokenizer import Encoder

EXCERPT = 200  # characters of a text that are shown
LEAD = 40  # of them before the first that was changed
BAR = 40  # characters of the longest bar


@dataclass(frozen=True)
class Decision:
    """What became of a document: why it was rejected, or its text before and after mending."""

    id: str
    decision: Literal["kept", "changed", "rejected"]
    text: str  # its beginning, or where it was first changed
    after: str = ""
    reason: str = ""  # filter, what it found, and the figures


@dataclass(frozen=True)
class Sample:
    """The first documents (or examples) of all sources, as many of each.

    Attributes:
        items: those that are kept, put right.
    """

    decisions: list[Decision]
    items: list[Item]
    rejections: Rejections

    @classmethod
    def of(cls, data: DataSection, count: int, bad: BadRecords) -> Sample:
        """Read and clean `count` documents; duplicates among them are not looked for.

        Raises:
            RequestError: as reading and cleaning do.
        """
        documents = Documents(data, LocalFolder(Path()), stored=False)
        decisions, items, rejections = list[Decision](), list[Item](), Rejections()
        each = -(-count // len(data.sources))
        for index in range(len(data.sources)):
            for reader, part, item in islice(_raw(data, index, bad), each):
                its_own = Rejections()
                kept = documents.clean(item, its_own)
                decisions.append(_decision(item, kept, its_own))
                rejections += its_own
                if kept is not None:
                    is_document = data.examples and kept.example is None
                    items.append(as_example(kept, reader, part) if is_document else kept)
        return cls(decisions, items, rejections)

    @property
    def counts(self) -> Counter[str]:
        """Documents by decision."""
        return Counter(decision.decision for decision in self.decisions)

    def to_json(self) -> dict[str, Any]:
        return {
            "documents": len(self.decisions),
            **{name: self.counts[name] for name in ("kept", "changed", "rejected")},
            "reasons": self.rejections.to_json()["reasons"],
            "decisions": [asdict(decision) for decision in self.decisions],
        }

    def show(self, console: Console, count: int) -> None:
        """`count` documents, and as many that were changed; all reasons for rejecting."""
        said = ", ".join(f"{number:,} {what}" for what, number in self.counts.items())
        console.print(f"of the first {len(self.decisions):,} documents: {said or 'none'}")
        first = Table("document", "decision", "text", box=None, pad_edge=False)
        for one in self.decisions[:count]:
            decision = f"rejected, {one.reason}" if one.reason else one.decision
            first.add_row(_plain(one.id), _plain(decision), _plain(one.text[: EXCERPT // 3]))
        console.print(first)
        if reasons := self.rejections.to_json()["reasons"]:
            table = Table("filter", "reason", "documents", "such as", box=None, pad_edge=False)
            for found in reasons:
                _, id, text, figures = found["samples"][0]
                example = _plain(f"{id} ({figures}): {text[: EXCERPT // 3]}")
                names = Text(found["filter"]), Text(found["reason"])
                table.add_row(*names, f"{found['documents']:,}", example)
            console.print(table)
        for one in [one for one in self.decisions if one.decision == "changed"][:count]:
            console.print(Text.assemble(_plain(one.id), " was:  ", _plain(one.text)))
            console.print(Text.assemble(_plain(one.id), " is:   ", _plain(one.after)))


def _raw(
    data: DataSection, index: int, bad: BadRecords
) -> Iterator[tuple[Reader | ExampleReader, Part, Item]]:
    """The documents of a source as they are read, one part after the other."""
    reader = make_reader(data.sources[index], index)
    for part in reader.parts(bad):
        for item in read_items(reader, part, bad, False, lambda item: item):
            yield reader, part, item


def _decision(item: Item, kept: Item | None, rejections: Rejections) -> Decision:
    if kept is None:
        (found,) = rejections.to_json()["reasons"]
        reason = f"{found['filter']}: {found['reason']} {found['samples'][0][3]}".strip()
        return Decision(item.id, "rejected", item.text[:EXCERPT], reason=reason)
    if kept.text == item.text:
        return Decision(item.id, "kept", item.text[:EXCERPT])
    pairs = enumerate(zip(item.text, kept.text, strict=False))
    changed = next((k for k, (old, new) in pairs if old != new), len(kept.text))
    start = max(0, changed - LEAD)
    here = slice(start, start + EXCERPT)
    return Decision(item.id, "changed", item.text[here], kept.text[here])


def _plain(text: str) -> Text:
    """On one line, and nothing in it that commands a terminal or is markup."""
    visible = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return Text("".join(visible))


def encoded(items: Iterable[Item], encoder: Encoder | ExampleEncoder) -> list[Encoded]:
    """Documents or examples in tokens; of documents every token but the first is a target."""
    if isinstance(encoder, ExampleEncoder):
        return encoder.encode([item.example for item in items if item.example])
    found = []
    for item in items:
        tokens, size = item.tokens, item.size
        if tokens is None:
            (tokens,) = encoder.encode([item.text])
        else:
            ((tokens, text),) = encoder.take([tokens])
            size = len(text.encode())
        weights = np.ones(len(tokens), np.float32)
        weights[:1] = 0
        found.append(Encoded(item.id, item.id, tokens, weights, size))
    return found


@dataclass(frozen=True)
class Lengths:
    """How long documents or examples are.

    Attributes:
        tokens: int64 [documents].
        bytes: of all their text in UTF-8.
        limit: sequence_length, where longer ones do not fit: of examples.
    """

    tokens: NDArray[np.int64]
    bytes: int
    limit: int | None = None

    @classmethod
    def of(cls, found: list[Encoded], limit: int | None) -> Lengths:
        tokens = np.array([len(one.tokens) for one in found], np.int64)
        return cls(tokens, sum(one.text_bytes for one in found), limit)

    def to_json(self) -> dict[str, Any]:
        count, total = len(self.tokens), int(self.tokens.sum())
        spread = np.percentile(self.tokens, (50, 90, 100)) if count else np.zeros(3)
        median, p90, most = (float(value) for value in spread)
        found = {
            "documents": count,
            "tokens": total,
            "bytes_per_token": self.bytes / max(1, total),
            "tokens_per_document": {"median": median, "p90": p90, "max": int(most)},
        }
        return found if self.limit is None else {**found, "longer": self._longer}

    @property
    def _longer(self) -> int:
        return int((self.tokens > (self.limit or 0)).sum())

    def show(self, console: Console) -> None:
        """The figures, and bars of how many there are up to each length."""
        said = self.to_json()
        spread = said["tokens_per_document"]
        kind = "documents" if self.limit is None else "examples"
        console.print(
            f"{said['documents']:,} {kind}, {said['tokens']:,} tokens, "
            f"{said['bytes_per_token']:.2f} bytes a token; tokens of each: median "
            f"{spread['median']:,.0f}, 90% up to {spread['p90']:,.0f}, max {spread['max']:,}"
        )
        table = Table("length", kind, "", box=None, pad_edge=False)
        rows = self._bars()
        most = max((count for _, count in rows), default=1)
        for size, count in rows:
            bar = "█" * (-(-BAR * count // most) if most else 0)
            table.add_row(f"to {size:,}", f"{count:,}", bar)
            if size == self.limit:
                share = self._longer / max(1, len(self.tokens))
                line = f"{self._longer:,} ({share:.1%}) are longer than sequence_length ({size:,})"
                table.add_row("─" * 8, "─" * 8, f"── {line}")
        console.print(table)

    def _bars(self) -> list[tuple[int, int]]:
        """Lengths up to powers of two, and up to the limit, with how many there are of each."""
        exponents = np.ceil(np.log2(np.maximum(self.tokens, 1))).astype(int)
        powers = {1 << exponent for exponent in set(exponents.tolist())}
        edges = sorted(powers | ({self.limit} if self.limit else set()))
        counts = Counter[int](np.searchsorted(np.array(edges), self.tokens).tolist())
        return [(edge, counts[k]) for k, edge in enumerate(edges)]
