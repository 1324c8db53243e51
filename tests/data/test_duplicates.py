"""Which documents of a corpus are dropped as duplicates, in any order, over any files."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rostra.config.duplicates import DuplicatesTable
from rostra.data.duplicates import HashWriter, duplicates, find_duplicates

WORDS = [f"word{number}" for number in range(400)]


def plain_duplicates(content: list[int], names: list[int], bands: list[list[int]]) -> list[bool]:
    """The definition, by the textbook's union-find."""
    parent = list(range(len(content)))

    def root(node: int) -> int:
        while parent[node] != node:
            node = parent[node]
        return node

    for values in [content, *bands]:
        first: dict[int, int] = {}
        for place, value in enumerate(values):
            parent[root(place)] = root(first.setdefault(value, place))
    kept: dict[int, int] = {}
    for place in sorted(range(len(content)), key=lambda i: (content[i], names[i])):
        kept.setdefault(root(place), place)
    return [kept[root(place)] != place for place in range(len(content))]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int]]:
    """Content, bands and another order of documents with equal values in common places."""
    count = draw(st.integers(0, 40))
    content = st.lists(st.integers(0, 30), min_size=count, max_size=count)
    band = st.lists(st.integers(0, 25), min_size=count, max_size=count)
    bands = draw(st.lists(band, max_size=3))
    return draw(content), bands, draw(st.permutations(range(count)))


@settings(max_examples=200)
@given(corpora())
def test_clusters_are_those_of_union_find_in_any_order(
    corpus: tuple[list[int], list[list[int]], list[int]],
) -> None:
    content, bands, order = corpus
    names = [place * 37 % 101 for place in range(len(content))]  # each once, in no order

    def run(places: Sequence[int]) -> list[bool]:
        chosen = [content[i] for i in places]
        # Both words of the content matter: the first is the same for many.
        two = np.array([[c // 8, c % 8] for c in chosen], np.uint64).reshape(-1, 2)
        own = np.array([names[i] for i in places], np.uint64)
        return duplicates(
            two, own, (np.array([band[i] for i in places], np.uint64) for band in bands)
        ).tolist()

    expected = plain_duplicates(content, names, bands)
    assert run(range(len(content))) == expected
    assert run(order) == [expected[i] for i in order]


def test_a_long_chain_is_one_cluster() -> None:
    count = 20_000
    shuffled = np.random.default_rng(0).permutation(count)  # so that ranks are not in line
    content = np.stack([shuffled.astype(np.uint64)] * 2, axis=1)
    pairs = np.arange(count, dtype=np.uint64)
    drop = duplicates(content, pairs, iter([pairs // 2, (pairs + 1) // 2]))
    assert np.flatnonzero(~drop).tolist() == [shuffled.argmin()]


def corpus(rng: np.random.Generator) -> list[tuple[str, str]]:
    """Ids and texts: of each six, one text, its copy, three near it, and another."""
    documents = []
    for group in range(8):
        words = list(rng.choice(WORDS, 120))
        for member in range(6):
            near = list(words)
            if 2 <= member < 5:
                near[20 * member] = "changed"  # of 116 5-grams, 5 are others: s = 0.92
            text = " ".join(near) if member < 5 else " ".join(rng.choice(WORDS, 120))
            documents.append((f"{group}-{member}", text))
    return documents


def kept_of(
    files: Sequence[Sequence[tuple[str, str]]], table: DuplicatesTable, folder: Path
) -> set[str]:
    paths = []
    for number, documents in enumerate(files):
        paths.append(folder / f"{number}.arrow")
        with HashWriter(paths[-1], "text:0", table) as writer:
            for start in range(0, len(documents), 5):  # several batches in a file
                ids, texts = zip(*documents[start : start + 5], strict=True)
                sha256 = [hashlib.sha256(text.encode()).digest() for text in texts]
                writer.add(ids, texts, sha256)
    found = find_duplicates(paths)
    assert [len(drop) for drop in found] == [len(documents) for documents in files]
    return {
        id
        for documents, drop in zip(files, found, strict=True)
        for (id, _), dropped in zip(documents, drop, strict=True)
        if not dropped
    }


DOCUMENTS = corpus(np.random.default_rng(1))
KEPT: dict[str, set[str]] = {}  # by what is looked for


@pytest.mark.parametrize("find", ["exact", "minhash"])
@settings(max_examples=12)
@given(
    order=st.permutations(range(len(DOCUMENTS))),
    cuts=st.lists(st.integers(0, len(DOCUMENTS)), max_size=4),
)
def test_what_stays_depends_on_no_order_and_no_partition(
    find: str, order: list[int], cuts: list[int]
) -> None:
    table = DuplicatesTable.model_validate({"find": find})
    mixed = [DOCUMENTS[place] for place in order]
    bounds = [0, *sorted(cuts), len(mixed)]
    files = [mixed[a:b] for a, b in itertools.pairwise(bounds)]
    with tempfile.TemporaryDirectory() as folder:
        kept = kept_of(files, table, Path(folder))
    assert kept == KEPT.setdefault(find, kept)
    if find == "minhash":  # the smallest of each group, and the one that is like none
        digests = {id: hashlib.sha256(text.encode()).digest() for id, text in DOCUMENTS}
        smallest = {min(digests[f"{group}-{member}"] for member in range(5)) for group in range(8)}
        assert smallest < {digests[id] for id in kept}
    assert len(kept) == {"exact": 40, "minhash": 16}[find]  # of 48: one copy each; five of a group


def test_documents_without_text_are_known_by_their_digests(tmp_path: Path) -> None:
    table = DuplicatesTable(find="minhash")
    with HashWriter(tmp_path / "hashes", "tokens:0", table) as writer:
        writer.add(["a", "b", "c"], [""] * 3, [bytes(32), bytes(range(32)), bytes(32)])
    (drop,) = find_duplicates([tmp_path / "hashes"])
    assert drop.sum() == 1
    assert not drop[1]


def test_no_files_no_duplicates() -> None:
    assert find_duplicates([]) == []
