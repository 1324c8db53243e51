"""Documents that hold what a model is to be tested on (Brown et al. 2020, appendix C)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rostra.config.duplicates import EvaluationSet, EvaluationTable
from rostra.data.duplicates.words import Hashes, Words, ngrams, normalise, words
from rostra.errors import RequestError
from rostra.files import File, find_files, open_range

MOST_PIECES = 10  # a document cut into more is dropped (Brown et al. 2020)


@dataclass(frozen=True, eq=False)
class Contamination:
    """Finds runs of `table.ngram` words that documents share with evaluation sets.

    Evaluation texts with fewer words are not looked for.
    """

    table: EvaluationTable
    grams: Hashes  # of all sets, ascending, each once
    owners: NDArray[np.intp]  # for each, the first set that has it
    digests: tuple[str, ...]  # of each set's n-grams

    @classmethod
    def of(cls, table: EvaluationTable) -> Contamination:
        """Read the evaluation sets.

        Raises:
            RequestError: for a set that is missing, broken, or too short to be found.
        """
        sets = [
            _grams(one, f"data.duplicates.evaluation.sets.{index}", table.ngram)
            for index, one in enumerate(table.sets)
        ]
        together = np.concatenate([np.empty(0, np.uint64), *sets])
        grams, first = np.unique(together, return_index=True)
        owners = np.searchsorted(np.cumsum([len(one) for one in sets]), first, "right")
        digests = tuple(hashlib.sha256(one.tobytes()).hexdigest() for one in sets)
        return cls(table, grams, owners, digests)

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides what is found and what is done: part of the cache's key."""
        return {
            "ngram": self.table.ngram,
            "found": self.table.found,
            "margin": self.table.margin,
            "sets": [
                [name_of(one), digest]
                for one, digest in zip(self.table.sets, self.digests, strict=True)
            ],
        }

    def check(self, text: str) -> str | None:
        """The name of an evaluation set that the text shares an n-gram with."""
        _, _, name = self._look(text)
        return name

    def apply(self, text: str) -> tuple[str | None, str | None]:
        """What is left of the text (None: it is to be dropped), and the set it was found in.

        With `found: remove` the shared words go with `margin` characters (up to a word's end) on
        both sides; of what is left, pieces shorter than `margin` go too. The other pieces are one
        document still, with a blank line for each cut.
        """
        found, hits, name = self._look(text)
        if name is None:
            return text, None
        if self.table.found == "reject":
            return None, name
        pieces = list(self._pieces(normalise(text), found, hits))
        if not pieces or len(pieces) > MOST_PIECES:
            return None, name
        return "\n\n".join(pieces), name

    def _look(self, text: str) -> tuple[Words, NDArray[np.intp], str | None]:
        """The text's words, the places of shared n-grams among them, and the first one's set."""
        found = words(normalise(text))
        own = ngrams(found.hashes, self.table.ngram)
        likely = np.flatnonzero(self._seen[own & np.uint64(len(self._seen) - 1)])
        places = np.minimum(np.searchsorted(self.grams, own[likely]), len(self.grams) - 1)
        same = self.grams[places] == own[likely]
        hits, owners = likely[same], self.owners[places[same]]
        return found, hits, name_of(self.table.sets[owners[0]]) if len(hits) else None

    @cached_property
    def _seen(self) -> NDArray[np.bool_]:
        """For each value of the last bits, whether any n-gram of the sets has it: spares looking
        for most others. A power of two, 8 to 16 times the n-grams."""
        seen = np.zeros(8 << len(self.grams).bit_length(), bool)
        seen[self.grams & np.uint64(len(seen) - 1)] = True
        return seen

    def _pieces(self, text: str, found: Words, hits: NDArray[np.intp]) -> Iterator[str]:
        """What is left between the cuts."""
        margin, last = self.table.margin, hits + self.table.ngram - 1
        first = np.searchsorted(found.starts, found.starts[hits] - margin, "right") - 1
        final = np.searchsorted(found.stops, found.stops[last] + margin)
        begins = found.starts[np.maximum(first, 0)].tolist()
        ends = found.stops[np.minimum(final, len(found.stops) - 1)].tolist()
        at = 0
        for begin, end in zip([*begins, len(text)], [*ends, len(text)], strict=True):
            piece = text[at:begin].strip()  # of cuts that overlap, nothing
            if len(piece) >= max(margin, 1):
                yield piece
            at = end


def name_of(one: EvaluationSet) -> str:
    return one.name or one.path


def _grams(one: EvaluationSet, key: str, n: int) -> Hashes:
    """The n-grams of a set, ascending, each once."""
    found = [ngrams(words(normalise(text)).hashes, n) for text in _texts(one, key)]
    grams = np.unique(np.concatenate([np.empty(0, np.uint64), *found]))
    if not len(grams):
        raise RequestError(
            f"{key}: no text of {one.path} has {n} words in a row to look for. Lower "
            "data.duplicates.evaluation.ngram, or name other `fields`."
        )
    return grams


def _texts(one: EvaluationSet, key: str) -> Iterator[str]:
    """The texts of a set.

    Raises:
        RequestError: for a missing or broken file, or a record without the fields.
    """
    try:
        for _, file in find_files(one.path, (".txt", ".jsonl")):
            yield from _texts_of(file, one.fields, key)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{one.path}: {error}. Correct {key}.path, or the file.") from None


def _texts_of(file: File, fields: tuple[str, ...], key: str) -> Iterator[str]:
    with open_range(file) as source:
        if file.suffix == ".txt":
            yield source.read().decode("utf-8-sig")
            return
        for number, line in enumerate(source, 1):
            if line.strip():
                yield _text(line, fields, f"{file.url}, line {number}", key)


def _text(line: bytes, fields: tuple[str, ...], where: str, key: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where}: is not JSON ({error}). Correct the file.") from None
    texts: list[str] = []
    for field in fields:
        value = record.get(field) if isinstance(record, dict) else None
        several = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str) for one in several):
            has = ", ".join(record) if isinstance(record, dict) else "no fields"
            raise RequestError(
                f"{where}: `{field}` is no text; the record has {has}. Set {key}.fields."
            )
        texts += map(str, several)
    return "\n".join(texts)
