"""Counts of rejected documents by filter and reason, with some of them kept for a look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from hashlib import sha256
from typing import Any

from rostra.data.clean.page import Rejection

SHOWN = 300  # characters of a document that is kept for a look

Kind = tuple[str, str]  # filter and reason


@dataclass(frozen=True, order=True)
class Rejected:
    """A rejected document.

    Attributes:
        hash: the first half of its text's SHA-256, which decides whether it is kept.
        id: the document's.
        text: its first 300 characters.
        figures: what was measured, and the threshold.
    """

    hash: str
    id: str
    text: str
    figures: str


@dataclass
class Rejections:
    """Rejected documents, counted. `a + b` is the same in any order and grouping.

    Attributes:
        limit: documents kept for a look, for each reason: those with the smallest hashes.
        counts: by filter and reason.
        samples: documents by filter and reason.
    """

    limit: int = 3
    counts: Counter[Kind] = field(default_factory=Counter)
    samples: dict[Kind, tuple[Rejected, ...]] = field(default_factory=dict)

    def add(self, id: str, text: str, rejection: Rejection) -> None:
        """Count a document, with its text as it was read."""
        kind = rejection.filter, rejection.reason
        self.counts[kind] += 1
        digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._keep(kind, [Rejected(digest, id, text[:SHOWN], rejection.figures)])

    def __add__(self, other: Rejections) -> Rejections:
        both = Rejections(min(self.limit, other.limit), self.counts + other.counts)
        for one in (self, other):
            for kind, found in one.samples.items():
                both._keep(kind, found)
        return both

    def _keep(self, kind: Kind, found: Iterable[Rejected]) -> None:
        every = sorted({*self.samples.get(kind, ()), *found})
        if every[: self.limit]:
            self.samples[kind] = tuple(every[: self.limit])

    @property
    def total(self) -> int:
        return self.counts.total()

    def to_json(self) -> dict[str, Any]:
        """As JSON values: `limit`, and `reasons`, the most frequent first."""
        kinds = sorted(self.counts, key=lambda kind: (-self.counts[kind], kind))
        return {
            "limit": self.limit,
            "reasons": [
                {
                    "filter": kind[0],
                    "reason": kind[1],
                    "documents": self.counts[kind],
                    "samples": [list(astuple(one)) for one in self.samples.get(kind, ())],
                }
                for kind in kinds
            ],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rejections:
        """What `to_json` gave."""
        made = cls(values["limit"])
        for row in values["reasons"]:
            kind = row["filter"], row["reason"]
            made.counts[kind] = row["documents"]
            made._keep(kind, (Rejected(*one) for one in row["samples"]))
        return made
