"""MinHash signatures of texts (Broder 1997), for many texts at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rostra.config.duplicates import DuplicatesTable
from rostra.data.duplicates.words import SEPARATOR, Hashes, mix, ngrams, normalise, words

BLOCK = 32_768  # n-grams permuted together: they and their images stay in the CPU's cache
_NO_WORD = np.uint64(0)  # fills texts up that are shorter than one n-gram


@dataclass(frozen=True)
class MinHash:
    """Signatures by which texts with many word n-grams in common are found.

    Of a text's set of n-grams, as 64-bit hashes x, `bands` times `hashes` permutations
    a x + b modulo 2^64, with odd a, keep the smallest image each. Two texts whose sets have the
    Jaccard similarity s agree in each with the chance s. The x are mixed hashes, so their images
    are as good as random under every permutation, though a family this small is min-wise
    independent only nearly (Broder et al. 1998; Indyk 2001), and 64 bits leave no equal images by
    chance. Texts that agree in all hashes of one band are candidates: 1 - (1 - s^hashes)^bands
    (Leskovec et al., Mining of Massive Datasets, 3.4; used for language models by Lee et al.
    2022). A band is folded into one word.
    """

    ngram: int = 5
    bands: int = 14
    hashes: int = 8

    @classmethod
    def of(cls, table: DuplicatesTable) -> MinHash:
        return cls(table.ngram, table.bands, table.hashes)

    def signatures(self, texts: Sequence[str]) -> Hashes:
        """A word for each band: [texts, bands].

        A text of fewer words than an n-gram is one n-gram; a text of no word at all is equal to
        none but itself.
        """
        if not texts:
            return np.empty((0, self.bands), np.uint64)
        return self._fold(self.minima(texts))

    def minima(self, texts: Sequence[str]) -> Hashes:
        """The smallest image of each text's n-grams: [bands * hashes, texts]."""
        grams, counts = self._grams(texts)
        stops = np.cumsum(counts)
        starts = stops - counts
        factors, terms = self._permutations()
        minima = np.full((len(factors), len(texts)), np.iinfo(np.uint64).max, np.uint64)
        images = np.empty(BLOCK, np.uint64)
        for begin in range(0, len(grams), BLOCK):
            block = grams[begin : begin + BLOCK]
            image = images[: len(block)]
            first = np.searchsorted(stops, begin, "right")
            last = np.searchsorted(starts, begin + len(block))
            at = np.maximum(starts[first:last] - begin, 0)
            for factor, term, smallest in zip(factors, terms, minima[:, first:last], strict=True):
                np.multiply(block, factor, out=image)
                np.add(image, term, out=image)
                np.minimum(smallest, np.minimum.reduceat(image, at), out=smallest)
        return minima

    def _grams(self, texts: Sequence[str]) -> tuple[Hashes, NDArray[np.intp]]:
        """Hashes of the n-grams of all texts, one text after the other, and how many each has."""
        normal = [normalise(text) for text in texts]
        found = words(SEPARATOR.join(normal))
        lengths = np.array([len(text) + 1 for text in normal])
        bounds = np.searchsorted(found.starts, np.cumsum(lengths))
        counts = np.diff(bounds, prepend=0)
        filled = np.maximum(counts, self.ngram)
        begins = np.cumsum(filled) - filled
        padded = np.full(filled.sum(), _NO_WORD)
        shift = np.repeat(begins - (bounds - counts), counts)
        padded[np.arange(len(found.hashes)) + shift] = found.hashes
        for wordless in np.flatnonzero(counts == 0):
            padded[begins[wordless]] = _hash(normal[wordless])
        inside = np.ones(len(padded), bool)  # n-grams that end in the text they begin in
        for back in range(1, self.ngram):
            inside[begins + filled - back] = False
        return ngrams(padded, self.ngram)[inside[: len(padded) - self.ngram + 1]], (
            filled - self.ngram + 1
        )

    def _permutations(self) -> tuple[Hashes, Hashes]:
        """Factors, odd, and terms: [bands * hashes] each."""
        count = self.bands * self.hashes
        drawn = mix(np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return drawn[:count] | np.uint64(1), drawn[count:]

    def _fold(self, minima: Hashes) -> Hashes:
        """Each band's hashes as one word: [texts, bands]."""
        banded = minima.reshape(self.bands, self.hashes, -1)
        folded = np.zeros_like(banded[:, 0])
        for row in range(self.hashes):
            folded += banded[:, row]
            mix(folded)
        return np.ascontiguousarray(folded.T)


def _hash(text: str) -> int:
    raw = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
