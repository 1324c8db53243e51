"""The words of a text as 64-bit hashes, and n-grams of them; numpy throughout.

Words are runs of letters, digits and marks in lower case, after Unicode's composition (NFC), so
punctuation, case and spacing make no difference. In scripts that are written without spaces each
character is a word. The hash of a word is its polynomial in an odd base modulo 2^64, read off
running sums over the whole text (Karp & Rabin 1987), and mixed, so that no word is looked at by
itself.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

SEPARATOR = "\0"  # between texts that are joined: no part of any word
WINDOW = 65_536  # characters looked at together: what is made of them stays in the CPU's cache
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse; 5 modulo 8, so that powers differ
_ALONE = np.uint32(1 << 31)  # marks a character that is a word by itself
_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # Han, here and below
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)


class Words(NamedTuple):
    """Words of a text: hashes [words], and where they lie in it, `text[start:stop]` [words]."""

    hashes: Hashes
    starts: NDArray[np.intp]
    stops: NDArray[np.intp]


def normalise(text: str) -> str:
    """Unicode's NFC; `words` takes and gives places in this form."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def words(text: str) -> Words:
    """The words of a normalised text, or of several joined by `SEPARATOR`."""
    found = [_words(text[start:stop], start) for start, stop in _windows(text)]
    if len(found) == 1:
        return found[0]
    empty = np.empty(0, np.intp)
    return Words(
        np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in found)]),
        np.concatenate([empty, *(part.starts for part in found)]),
        np.concatenate([empty, *(part.stops for part in found)]),
    )


def ngrams(hashes: Hashes, n: int) -> Hashes:
    """Hashes of the runs of `n` words: [words - n + 1]."""
    count = max(len(hashes) - n + 1, 0)
    grams = hashes[:count].copy()
    for later in range(1, n):
        grams *= np.uint64(_BASE)
        grams += hashes[later : later + count]
    return mix(grams)


def mix(values: Hashes) -> Hashes:
    """A bijection of 64-bit words whose bits all depend on all bits (the end of SplitMix64,
    Steele et al. 2014); in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values


def _windows(text: str) -> Iterator[tuple[int, int]]:
    """Cuts a text between words. A text that is joined to others is cut as it would be alone:
    the cut is at the last separator, if there is one, so that a long text begins a window."""
    start = 0
    while start < len(text):
        stop = start + WINDOW
        if stop < len(text):
            cut = text.rfind(SEPARATOR, start, stop) + 1 or text.rfind(" ", start, stop) + 1
            stop = cut or stop
        yield start, min(stop, len(text))
        start = stop


def _words(text: str, offset: int) -> Words:
    """`words` of one window; `offset` is its place in the text."""
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    letters = _letters()[characters]
    inside = np.zeros(len(letters) + 2, bool)
    np.not_equal(letters, 0, out=inside[1:-1])
    edges = inside[1:] != inside[:-1]
    alone = letters >= _ALONE
    begins, ends = edges & inside[1:], edges & inside[:-1]
    if alone.any():
        begins[:-1] |= alone
        begins[1:] |= alone & inside[2:]
        ends[1:] |= alone
        ends[:-1] |= alone & inside[:-2]
    starts, stops = np.flatnonzero(begins), np.flatnonzero(ends)
    powers, inverses = _powers()
    sums = np.zeros(len(letters) + 1, np.uint64)
    np.cumsum(letters * powers[: len(letters)], out=sums[1:])
    hashes = (sums[stops] - sums[starts]) * inverses[starts]
    return Words(mix(hashes), starts + offset, stops + offset)


@cache
def _powers() -> tuple[Hashes, Hashes]:
    """The base's powers and their inverses modulo 2^64, for all places in a window."""
    tables = []
    for factor in (_BASE, pow(_BASE, -1, 1 << 64)):
        table = np.full(WINDOW + 1, factor, np.uint64)
        table[0] = 1
        tables.append(np.cumprod(table, out=table))
    return tables[0], tables[1]


@cache
def _letters() -> NDArray[np.uint32]:
    """For each code point: that of its lower case, or 0 when it is in no word."""
    table = np.zeros(0x110000, np.uint32)
    for code, character in enumerate(map(chr, range(0x110000))):
        if character.isalnum() or unicodedata.category(character)[0] == "M":
            lower = character.lower()
            table[code] = ord(lower) if len(lower) == 1 else code
    for first, last in _WITHOUT_SPACES:
        known = table[first : last + 1]
        known[known > 0] |= _ALONE
    return table
