"""Gopher's filters: quality and repetition.

Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training Gopher",
appendix A.1.1 and table A1, arXiv:2112.11446.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rostra.config.cleaning import GopherQualityTable, GopherRepetitionTable
from rostra.data.clean.page import Page, Reason, above, below, duplicates

BULLETS = ("•", "-")
ELLIPSES = ("...", "…")
LETTER = re.compile(r"[^\W\d_]")
PARAGRAPH_END = re.compile(r"\n{2,}")
LINE_END = re.compile(r"\n+")
BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial hash of n-grams; odd and without pattern


def gopher_quality(page: Page, table: GopherQualityTable) -> Reason | None:
    """What shows that a document is no prose: its number of words, their mean length, symbols
    a word, lines that are bullets or break off, words without letters, missing stop words.

    A mark of punctuation is no word, but counts where symbols are measured beside words; so does
    one that stands by itself among words with and without letters.
    """
    words = page.words
    number = len(words)
    if found := below("few words", number, table.min_words):
        return found
    if not number:
        return None  # min_words is 0: no words are enough, and nothing can be said of them
    length = sum(map(len, words)) / number
    return (
        above("many words", number, table.max_words)
        or below("short words", length, table.min_word_length)
        or above("long words", length, table.max_word_length)
        or above("hash signs", page.text.count("#") / len(page.tokens), table.max_symbols)
        or above("ellipses", _ellipses(page.text) / len(page.tokens), table.max_symbols)
        or above("bullet lines", _bullet_lines(page), table.max_bullet_lines)
        or above("ellipsis lines", _ellipsis_lines(page), table.max_ellipsis_lines)
        or below("alphabetic words", _alphabetic(page.text.split()), table.min_alphabetic_words)
        or below("stop words", _stop_words(words, table.stop_words), table.min_stop_words)
    )


def _ellipses(text: str) -> int:
    return sum(map(text.count, ELLIPSES))


def _bullet_lines(page: Page) -> float:
    return sum(line.lstrip().startswith(BULLETS) for line in page.lines) / len(page.lines)


def _ellipsis_lines(page: Page) -> float:
    return sum(line.rstrip().endswith(ELLIPSES) for line in page.lines) / len(page.lines)


def _alphabetic(words: list[str]) -> float:
    return sum(1 for word in words if word.isalpha() or LETTER.search(word)) / len(words)


def _stop_words(words: list[str], stop_words: tuple[str, ...]) -> int:
    return len(set(stop_words).intersection(words))


def gopher_repetition(page: Page, table: GopherRepetitionTable) -> Reason | None:
    """What shows that a document repeats itself: its lines, paragraphs and n-grams of words.

    All but two measures are shares of the characters. N-grams that were there before count no
    character twice.
    """
    text = page.text
    if not text:
        return None
    return (
        _repeated(
            "paragraphs",
            PARAGRAPH_END.split(text.strip()),
            len(text),
            table.duplicate_paragraphs,
            table.duplicate_paragraph_characters,
        )
        or _repeated(
            "lines",
            LINE_END.split(text),
            len(text),
            table.duplicate_lines,
            table.duplicate_line_characters,
        )
        or _repeated_ngrams(page, table)
    )


def _repeated(
    name: str, parts: list[str], size: int, most: float, most_characters: float
) -> Reason | None:
    number, characters = duplicates(parts)
    return above(f"duplicate {name}", number / len(parts), most) or above(
        f"characters in duplicate {name}", characters / size, most_characters
    )


def _repeated_ngrams(page: Page, table: GopherRepetitionTable) -> Reason | None:
    tokens, size = page.tokens, len(page.text)
    longest = max((*table.top_ngrams, *table.duplicate_ngrams), default=0)
    ends = np.cumsum([0, *map(len, tokens)])  # ends[b] - ends[a]: characters of tokens a to b
    for n, starts, groups in _repeats(tokens, longest):
        lengths = ends[starts + n] - ends[starts]
        if n in table.top_ngrams and len(tokens) >= n:
            characters = _most_frequent(groups, lengths + n - 1)  # with the spaces between
            share = (characters or ends[n] + n - 1) / size  # else all are as frequent as the first
            if found := above(f"most frequent {n}-gram", share, table.top_ngrams[n]):
                return found
        if n in table.duplicate_ngrams:
            share = _covered(n, starts, groups, lengths) / size
            if found := above(f"duplicate {n}-grams", share, table.duplicate_ngrams[n]):
                return found
    return None


def _repeats(
    tokens: list[str], longest: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """For each n, the places [k] of all n-grams that occur more than once, in their order, and
    which of them are the same: groups [k], numbered by their first place.

    A repeated n-gram begins with a repeated one of n - 1, so ever fewer places are looked at.
    """
    numbers = {token: number for number, token in enumerate(dict.fromkeys(tokens), 1)}
    words = np.fromiter(map(numbers.__getitem__, tokens), np.uint64, len(tokens))
    starts, hashes = np.arange(len(words)), words
    for n in range(1, longest + 1):
        if n > 1:
            inside = starts + n <= len(words)
            starts, hashes = starts[inside], hashes[inside]
            hashes = hashes * BASE + words[starts + n - 1]
        _, first, inverse, counts = np.unique(
            hashes, return_index=True, return_inverse=True, return_counts=True
        )
        again = counts[inverse] > 1
        groups = first[inverse][again]
        starts, hashes = starts[again], hashes[again]
        yield n, starts, groups


def _most_frequent(groups: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """Characters in all occurrences of the most frequent n-gram, the first of several."""
    if not len(groups):
        return 0
    _, first, counts = np.unique(groups, return_index=True, return_counts=True)
    top = counts.argmax()
    return int(lengths[first[top]] * counts[top])


def _covered(
    n: int, starts: NDArray[np.int64], groups: NDArray[np.int64], lengths: NDArray[np.int64]
) -> int:
    """Characters in n-grams that were there before, none counted twice."""
    seen: set[int] = set()
    free = characters = 0
    for start, group, length in zip(
        starts.tolist(), groups.tolist(), lengths.tolist(), strict=True
    ):
        if start < free:
            continue
        if group in seen:
            characters += length
            free = start + n
        seen.add(group)
    return characters
