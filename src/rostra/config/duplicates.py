"""The table `data.duplicates`: documents that say the same, and those of evaluation sets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rostra.config.base import Count, Section, Whole


class EvaluationSet(Section):
    """Texts that a model is to be tested on, and so must not be trained on."""

    path: str = Field(description="a .txt or .jsonl file, a folder, or a glob")
    name: str | None = Field(None, description="for counts and messages; `path` when not given")
    fields: tuple[str, ...] = Field(
        ("text",), min_length=1, description="of a JSONL record, joined to one text"
    )


class EvaluationTable(Section):
    """Which evaluation sets are looked for in the documents, and what is done when found."""

    sets: tuple[EvaluationSet, ...] = Field((), description="no set, nothing is looked for")
    ngram: Count = Field(13, description="words in a row that a document must not share with a set")
    found: Literal["reject", "remove"] = Field(
        "reject", description="drop the whole document, or cut the shared words out of it"
    )
    margin: Whole = Field(200, description="remove: characters cut on both sides of shared words")


class DuplicatesTable(Section):
    """Documents that say the same, and those of evaluation sets."""

    find: Literal["none", "exact", "minhash"] = Field(
        "none",
        description="drop documents whose text is another's (exact), or nearly so too (minhash)",
    )
    ngram: Count = Field(5, description="minhash: words in a row that are compared")
    bands: Count = Field(14, description="minhash: one band in common makes two documents equal")
    hashes: Count = Field(8, description="minhash: hashes in a band")
    evaluation: EvaluationTable = EvaluationTable()

    @property
    def threshold(self) -> float:
        """The Jaccard similarity near which the chance of being found rises from 0 to 1."""
        return (1 / self.bands) ** (1 / self.hashes)
