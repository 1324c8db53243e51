"""Words known by heart: byte-level BPE that asks the tokenizer for the tokens of a word once."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Of the classes of Unicode, the members that are ASCII.
_CLASSES = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "N": "0-9",
}
_TOKEN = re.compile(r"\\p\{(\w+)\}|\\.|\[\^?|\]|[^\\\[\]]+", re.DOTALL)
_OTHER = re.compile(r"[^\x00-\x7f]+")
_BORDER = re.compile(r"(?<=[a-z])(?= [a-z])")  # between two words, for every such pattern
_RARE = 64  # a text with other characters more often than one in so many goes as a whole
_KEPT = 1 << 18  # words, in some 50 MB
_LONG = 64  # characters; longer words hardly come again


class Words(dict[str, bytes]):
    """The tokens of words, by the word, as bytes of `dtype`.

    A BPE tokenizer cuts a text into words by a pattern and encodes each by itself. Python's `re`
    cuts ASCII text by the same pattern just as the library does (`of` tries it), and natural text
    has few words many times over: looking them up is four times as quick as encoding them.
    """

    def __init__(self, backend: Tokenizer, pattern: re.Pattern[str], dtype: type[Any]) -> None:
        self._cut = pattern.findall
        self._model = backend.model
        self._bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._dtype = dtype

    @classmethod
    def of(cls, backend: Tokenizer, dtype: type[Any]) -> Words | None:
        """None for tokenizers that are not of this kind."""
        spec = json.loads(backend.to_str())
        normalizer, model = spec["normalizer"], spec["model"]
        plain = normalizer is None or normalizer["type"] == "NFC"  # which leaves ASCII as it is
        special = all(token["special"] for token in spec["added_tokens"])  # others may hold a space
        if not plain or not special or model["type"] != "BPE" or model.get("dropout"):
            return None
        written = _pattern_of(spec["pre_tokenizer"] or {})
        pattern = ascii_pattern(written) if written is not None else None
        if pattern is None or not _cuts_alike(pattern, backend):
            return None
        return cls(backend, pattern, dtype)

    def tokens(self, text: str) -> NDArray[Any]:
        """Of a text that is ASCII."""
        found = b"".join(map(self.__getitem__, self._cut(text)))
        return np.frombuffer(found, dtype=self._dtype)

    def __missing__(self, word: str) -> bytes:
        pieces = self._bytes.pre_tokenize_str(word)
        ids = [token.id for piece, _ in pieces for token in self._model.tokenize(piece)]
        found = np.array(ids, dtype=self._dtype).tobytes()
        if len(self) < _KEPT and len(word) <= _LONG:
            self[word] = found
        return found


def stretches(text: str) -> Iterator[tuple[bool, str]]:
    """The text in parts that are ASCII (True) or are not, each border between two words."""
    if text.isascii():
        yield True, text
        return
    others = [match.span() for match in _OTHER.finditer(text)]
    if len(others) * _RARE > len(text):
        yield False, text
        return
    done, index = 0, 0
    while index < len(others):
        start = _border_before(text, others[index][0], done)
        while index < len(others):
            border = _BORDER.search(text, others[index][1])
            end = border.start() if border else len(text)
            while index < len(others) and others[index][0] < end:
                index += 1
            if index == len(others) or _border_before(text, others[index][0], end) > end:
                break
        if start > done:
            yield True, text[done:start]
        yield False, text[start:end]
        done = end
    if done < len(text):
        yield True, text[done:]


def _border_before(text: str, place: int, least: int) -> int:
    """The last border before `place`, at the least `least`, which is one."""
    while (place := text.rfind(" ", least + 1, place)) > 0:
        if _BORDER.match(text, place):
            return place
    return least


def ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """What a tokenizer's pattern is for ASCII text, in the words of `re`; None where it has
    classes that are not known here."""
    inside, written = False, []
    for match in _TOKEN.finditer(pattern):
        part, name = match[0], match[1]
        if part.startswith("["):
            inside = True
        elif part == "]":
            inside = False
        elif part.startswith("\\P") or (name and (name not in _CLASSES)):
            return None
        elif name:
            part = _CLASSES[name]
            if not inside:
                part = f"[{part}]" if part else "(?!)"
        written.append(part)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of what only other dialects know
        try:
            return re.compile("".join(written), re.ASCII)
        except (re.error, FutureWarning):
            return None


def _pattern_of(splitter: dict[str, Any]) -> str | None:
    if splitter.get("type") == "ByteLevel" and not splitter["add_prefix_space"]:
        return _GPT2 if splitter["use_regex"] else None
    parts = splitter.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    cut, byte_level = parts
    isolated = cut["behavior"] == "Isolated" and not cut["invert"]
    if not isolated or byte_level["add_prefix_space"] or byte_level["use_regex"]:
        return None
    found: str | None = cut["pattern"].get("Regex")
    return found


def _cuts_alike(pattern: re.Pattern[str], backend: Tokenizer) -> bool:
    """Whether `re` and the library agree on text in which anything may stand beside anything."""
    draw = random.Random(0)
    usual = "abcABC   ''\n\n\t\r09.,-_(){}stredvml"
    every = [chr(code) for code in range(128)]
    for text in (
        "".join(draw.choices(usual, k=8192)),
        "".join(draw.choices(every, k=8192)),
        "".join(a + b + "a" for a in every for b in every),
    ):
        spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
        if [match.span() for match in pattern.finditer(text)] != spans:
            return False
    return True
