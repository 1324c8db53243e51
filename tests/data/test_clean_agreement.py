"""The filters decide as datatrove's do, document by document, but for what is explained here."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rostra.config.cleaning import CleanTable
from rostra.data.clean import Cleaner, Rejection
from support import need

PAGE = 4000  # characters of a book
# What datatrove alone says of a document so near to the threshold that a word counts:
NEAR = {
    # 0.1502 against 0.1490, the threshold being 0.15: its words are those of spaCy, which leaves
    # some with slashes and brackets whole.
    ("gopher_repetition", "web 192"): "duplicated_5_n_grams",
}


def pages(folder: Path) -> dict[str, str]:
    """Pages of the web, and of books."""
    lines = (folder / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    found = {f"web {k}": json.loads(line)["text"] for k, line in enumerate(lines)}
    for book in sorted((folder / "gutenberg").glob("*.txt")):
        text = book.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
        starts = range(0, len(text), PAGE)
        found |= {f"{book.stem} {k}": text[k : k + PAGE] for k in starts[::16]}
    return found


def theirs() -> dict[str, Any]:
    """datatrove's filters by our names, without their statistics."""
    from datatrove.pipeline import filters

    made = {
        "gopher_quality": filters.GopherQualityFilter(),
        "gopher_repetition": filters.GopherRepetitionFilter(),
        "fineweb": filters.FineWebQualityFilter(),
        "c4": filters.C4QualityFilter(),
    }
    for one in made.values():
        one.stat_update = lambda *_, **__: None
    return made


def explained(name: str, place: str, text: str, verdict: str | bool, found: str | Rejection) -> str:
    """Why two filters do not decide alike; nothing where there is no reason."""
    if verdict == "gopher_below_alpha_threshold":
        # datatrove counts marks of punctuation as words without a letter, so that every fifth
        # page of a novel is rejected; the paper speaks of words.
        words = text.split()
        letters = sum(any(map(str.isalpha, word)) for word in words)
        return "marks are no words" if letters / len(words) >= 0.8 else ""
    if isinstance(found, Rejection) and found.reason == "curly bracket" and verdict is True:
        return "in a removed line" if "{" in text else ""
    return "near" if NEAR.get((name, place)) == verdict else ""


@pytest.mark.soak
def test_decisions_are_those_of_datatrove(shared_data: Path) -> None:
    need(find_spec("datatrove") and find_spec("spacy"), "datatrove with spacy")
    from datatrove.data import Document

    filters = theirs()
    cleaners = {name: Cleaner.of(CleanTable(**{name: {}}), Path()) for name in filters}
    agreed: Counter[tuple[str, bool]] = Counter()
    for place, text in pages(shared_data).items():
        for name, clean in cleaners.items():
            document = Document(text=text, id=place)
            decision, found = filters[name].filter(document), clean(text, {})
            kept = not isinstance(found, Rejection)
            if kept == (decision is True):
                agreed[name, kept] += 1
                assert not kept or found == document.text  # c4 removes the same lines
            else:
                verdict = decision if decision is True else decision[1]
                assert explained(name, place, text, verdict, found), (name, place, verdict, found)
    assert min(agreed[name, True] for name in filters) > 200
    assert agreed["gopher_quality", False] > 10 < agreed["gopher_repetition", False]
    assert agreed["c4", False] > 40 and agreed["fineweb", False] > 10
