"""FineWeb's filters for pages that are lists or repeat their lines.

Penedo et al. 2024, "The FineWeb Datasets: Decanting the Web for the Finest Text Data at Scale",
section 3.6, arXiv:2406.17557.
"""

from __future__ import annotations

import regex

from rostra.config.cleaning import FineWebTable
from rostra.data.clean.page import Page, Reason, above, below, duplicates

PUNCTUATED = regex.compile(r"\p{Sentence_Terminal}\s*\Z")  # of all scripts, as Unicode has it


def fineweb(page: Page, table: FineWebTable) -> Reason | None:
    """What shows that a document is no running text: few lines that end a sentence, many short
    lines, lines that were there before, more line ends than its words explain."""
    lines = [line for line in page.text.split("\n") if line and not line.isspace()]
    if not lines:
        return Reason("no lines")
    punctuated = sum(1 for line in lines if PUNCTUATED.search(line[-8:])) / len(lines)
    short = sum(1 for line in lines if len(line) <= table.short_line) / len(lines)
    newlines = page.text.count("\n")
    repeated = duplicates(lines)[1] / (len(page.text) - newlines)
    return (
        below("punctuated lines", punctuated, table.min_punctuated_lines)
        or above("short lines", short, table.max_short_lines)
        or above("duplicate characters", repeated, table.max_duplicate_characters)
        or above("newlines", newlines / max(1, len(page.tokens)), table.max_newlines)
    )
