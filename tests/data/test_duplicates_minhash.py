"""MinHash: that it estimates the Jaccard similarity, and finds what its formula says."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rostra.config.duplicates import DuplicatesTable
from rostra.data.duplicates import minhash, words
from rostra.data.duplicates.minhash import MinHash

PIECES = [*"abcdefgh XYZ", " ", "\n", "é", "e\u0301", "漢", "ก", "_", "’", "\0", "😀"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=200).map("".join)


def split(text: str) -> list[str]:
    text = words.normalise(text)
    found = words.words(text)
    return [text[a:b] for a, b in zip(found.starts, found.stops, strict=True)]


def pairs(rng: np.random.Generator, count: int, shared: int, apart: int) -> list[str]:
    """Texts two by two: of words drawn at random, `shared` in common and `apart` in one of them.

    As sets of words their Jaccard similarity is shared / (shared + apart).
    """
    texts = []
    for _ in range(count):
        drawn = [f"{word:x}" for word in rng.choice(1 << 40, shared + apart, replace=False)]
        common, one, other = np.split(drawn, [shared, shared + apart // 2])
        texts += [" ".join([*common, *one]), " ".join([*other, *common])]
    return texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don’t  STOP,you_now!", ["Don", "t", "STOP", "you", "now"]),
        ("", []),
        ("… — 😀", []),
        ("日本 x漢字y", ["日", "本", "x", "漢", "字", "y"]),  # no spaces: each character
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),  # marks belong to their letters
        ("e\u0301te\u0301", ["été"]),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert split(text) == expected


def test_hashes_of_words_differ_and_depend_on_the_word_alone() -> None:
    rng = np.random.default_rng(0)
    drawn = {"".join(rng.choice(list("abcdefgh01"), size)) for size in rng.integers(1, 9, 30_000)}
    listed = sorted(drawn)
    hashes = words.words(" ".join(listed)).hashes
    assert len(set(hashes.tolist())) == len(listed)
    again = words.words("?" + "  ".join(reversed(listed)).upper()).hashes[::-1]
    assert (hashes == again).all()
    composed, taken_apart = "café déjà vu", unicodedata.normalize("NFD", "CAFÉ, déjà – vu")
    signatures = MinHash().signatures([composed, taken_apart])
    assert (signatures[0] == signatures[1]).all()


@settings(max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_a_signature_depends_on_its_text_alone(texts: list[str]) -> None:
    """Not on the texts beside it, nor on where windows and blocks end."""
    hasher = MinHash(ngram=3, bands=2, hashes=2)
    whole = hasher.signatures(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minhash, "BLOCK", 5)
        assert (hasher.signatures(texts) == whole).all()
        patch.setattr(words, "WINDOW", 16)  # cuts words that are longer, wherever they stand
        alone = np.concatenate([hasher.signatures([text]) for text in texts])
        assert (hasher.signatures(texts) == alone).all()


def test_windows_end_between_words() -> None:
    rng = np.random.default_rng(3)
    text = " ".join("x" * size for size in rng.integers(1, 30, 20_000))
    found = words.words(text)
    assert [m.span() for m in re.finditer(r"\w+", text)] == [
        *zip(found.starts.tolist(), found.stops.tolist(), strict=True)
    ]
    assert len(np.unique(found.hashes)) == 29


def test_ngrams_are_of_one_text_and_short_texts_are_one() -> None:
    hasher = MinHash(ngram=3, bands=4, hashes=2)
    a = hasher.signatures(["one two three", "four five six", "one two", "two one", "two", "", "!"])
    assert len(np.unique(a[:, 0])) == 7
    run_on = hasher.signatures(["one two three four five six"])
    by_hand = np.minimum.reduce(
        [hasher.minima([f"{x} {y} {z}"]) for x, y, z in
         [("one", "two", "three"), ("two", "three", "four"), ("three", "four", "five"),
          ("four", "five", "six")]]
    )  # fmt: skip
    assert (hasher.minima(["one two three four five six"]) == by_hand).all()
    assert (run_on == hasher.signatures(["One, two: three four FIVE six; "])).all()
    assert hasher.signatures([]).shape == (0, 4)
    order = MinHash(ngram=2).signatures(["alpha beta", "beta alpha"])
    assert not (order[0] == order[1]).any()


def test_signatures_are_the_same_on_every_machine() -> None:
    signature = MinHash(ngram=2, bands=2, hashes=3).signatures(["Wer reitet so spät"])
    assert [f"{word:016x}" for word in signature[0].tolist()] == GOLDEN


GOLDEN = ["df5fc403f9ab9e8d", "f92676df3714aa85"]


@pytest.mark.parametrize("shared", [20, 50, 72, 90])
def test_the_estimate_is_unbiased_and_spreads_as_it_should(shared: int) -> None:
    """Agreeing minima are 112 independent draws of the chance s: mean s, variance s(1-s)/112."""
    count, s = 1500, shared / 100
    texts = pairs(np.random.default_rng(shared), count, shared, 100 - shared)
    minima = MinHash(ngram=1).minima(texts)
    estimates = (minima[:, ::2] == minima[:, 1::2]).mean(axis=0)
    variance = s * (1 - s) / len(minima)
    assert abs(estimates.mean() - s) < 4 * (variance / count) ** 0.5
    assert estimates.var() / variance == pytest.approx(1, abs=4 * (2 / count) ** 0.5)


@pytest.mark.parametrize("shared", [50, 65, 72, 80])
def test_candidates_come_up_as_often_as_the_formula_says(shared: int) -> None:
    count, s = 3000, shared / 100
    texts = pairs(np.random.default_rng(shared + 1), count, shared, 100 - shared)
    signatures = MinHash.of(DuplicatesTable(ngram=1)).signatures(texts)
    assert signatures.shape == (2 * count, 14)
    found = (signatures[::2] == signatures[1::2]).any(axis=1).mean()
    expected = 1 - (1 - s**8) ** 14
    assert abs(found - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


def test_threshold_is_the_published_one() -> None:
    assert DuplicatesTable().threshold == pytest.approx(0.72, abs=0.002)
