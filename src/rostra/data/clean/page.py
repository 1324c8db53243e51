"""A document on its way through the filters: its text, and the parts that several ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# Words, with what joins them within (3.5, don't), runs of dots or dashes, and any other
# mark by itself: about what tokenizers of treebanks find, on which the thresholds were chosen.
WORD = re.compile(r"[^\W_]+(?:[.,'’@][^\W_]+)*|\.+|-+|[^\w\s]|_")


@dataclass(frozen=True)
class Rejection:
    """Why a document is not kept.

    Attributes:
        filter: its name in `data.clean`.
        reason: what rejections are counted by.
        figures: what was measured, and the threshold.
    """

    filter: str
    reason: str
    figures: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.filter, self.reason, self.figures)))


@dataclass(frozen=True)
class Reason:
    """What a filter finds against a document; see `Rejection`."""

    name: str
    figures: str = ""


def below(name: str, value: float, least: float) -> Reason | None:
    """A reason by this name, if `value` is below `least`."""
    return Reason(name, f"{value:.4g} < {least}") if value < least else None


def above(name: str, value: float, most: float) -> Reason | None:
    """A reason by this name, if `value` is above `most`."""
    return Reason(name, f"{value:.4g} > {most}") if value > most else None


class Page:
    """A text and its parts, each found once, on first use.

    Attributes:
        text: the document's; `replace` sets another.
        metadata: what came with it.
    """

    def __init__(self, text: str, metadata: Mapping[str, Any]) -> None:
        self.text, self.metadata = text, metadata

    def replace(self, text: str) -> None:
        """Go on with another text."""
        if text != self.text:
            metadata = self.metadata
            vars(self).clear()  # the parts were the old text's
            self.text, self.metadata = text, metadata

    @cached_property
    def tokens(self) -> list[str]:
        """Words and marks of punctuation, in their order."""
        return WORD.findall(self.text)

    @cached_property
    def words(self) -> list[str]:
        """The tokens that are words, of letters and digits."""
        return [token for token in self.tokens if token[0].isalnum()]

    @cached_property
    def lines(self) -> list[str]:
        """Lines, as `str.splitlines` has them."""
        return self.text.splitlines()


def duplicates(parts: list[str]) -> tuple[int, int]:
    """How many parts were there before, and the characters in them."""
    seen: set[str] = set()
    number = characters = 0
    for part in parts:
        if part in seen:
            number += 1
            characters += len(part)
        seen.add(part)
    return number, characters
