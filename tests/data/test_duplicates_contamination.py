"""Documents that hold texts of evaluation sets are found, and dropped or cut."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rostra.config.duplicates import EvaluationTable
from rostra.data.duplicates import Contamination
from rostra.errors import RequestError

QUESTION = "How many roads must a man walk down before you can call him one at last"  # 16 words
SHARED = "HOW many roads -- must a man walk down, before you can call him"  # 13 of them
ANSWER = "The answer, my friend, is blowing in the wind"


def looked_for(folder: Path, **changes: Any) -> Contamination:
    records = [{"question": QUESTION, "answers": [ANSWER, "no"]}, {"question": "x", "answers": []}]
    path = folder / "songs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "poem.txt").write_text("nought but a line of " + " ".join(map(str, range(100))))
    table = {
        "sets": [
            {"path": str(path), "name": "songs", "fields": ["question", "answers"]},
            {"path": str(folder / "p*.txt")},
        ],
        **changes,
    }
    return Contamination.of(EvaluationTable.model_validate_json(json.dumps(table)))


def test_a_shared_ngram_rejects_a_document(tmp_path: Path) -> None:
    find = looked_for(tmp_path)
    around = " one two three " * 50
    assert find.check(around + SHARED + around) == "songs"
    assert find.check(SHARED) == "songs"
    assert find.check(SHARED.removesuffix(" him") + around) is None  # 12 words
    assert find.check(around + SHARED.replace("walk", "run")) is None
    assert find.check("last the answer my friend is blowing in the wind no" + around) is None
    runs = [" ".join(map(str, range(first, first + 13))) for first in range(88)]
    assert {find.check(run) for run in runs} == {str(tmp_path / "p*.txt")}
    assert find.check("") is None
    assert find.apply(around + SHARED) == (None, "songs")
    assert find.apply(around) == (around, None)
    again = pickle.loads(pickle.dumps(find))  # it goes to other processes
    assert again.check(SHARED) == "songs"


def test_fields_are_one_text_and_ngram_is_a_key(tmp_path: Path) -> None:
    assert looked_for(tmp_path).check(f"him one at last. {ANSWER}") == "songs"
    assert looked_for(tmp_path, ngram=17).check(SHARED) is None
    assert looked_for(tmp_path, ngram=3).check("you can call") == "songs"
    (tmp_path / "needle.txt").write_text("needle")
    table = {"sets": ({"path": str(tmp_path / "needle.txt"), "name": "one"},), "ngram": 1}
    find = Contamination.of(EvaluationTable.model_validate(table))
    hay = " ".join(f"hay{number}" for number in range(1000))
    assert [find.check(hay), find.check(hay + " Needle!")] == [None, "one"]


def test_shared_words_are_cut_with_their_margin(tmp_path: Path) -> None:
    find = looked_for(tmp_path, found="remove", margin=20)
    before, after = "cafe\u0301 " * 20, "tail of it " * 20  # the first is six characters, then five
    text, name = find.apply(f"{before}{SHARED}. {QUESTION}! {after}")
    assert name == "songs"
    assert text == ("café " * 16).strip() + "\n\n" + ("it " + "tail of it " * 18).strip()
    assert find.check(text) is None
    # What is left is too short, or too many pieces.
    assert find.apply("short " + SHARED + " short") == (None, "songs")
    assert find.apply((before + SHARED + " ") * 10)[0] is not None
    assert find.apply((before + SHARED + " ") * 11) == (None, "songs")
    bare = looked_for(tmp_path, found="remove", margin=0)
    assert bare.apply(f"Here: {SHARED}!") == ("Here:\n\n!", "songs")


def test_identity_is_that_of_contents_and_keys(tmp_path: Path) -> None:
    def identity(**changes: Any) -> str:
        return json.dumps(looked_for(tmp_path, **changes).identity)

    once = identity()
    assert once == identity()
    assert len({once, identity(ngram=12), identity(found="remove"), identity(margin=1)}) == 4
    table = EvaluationTable.model_validate(
        {"sets": ({"path": str(tmp_path / "songs.jsonl"), "fields": ("question",)},)}
    )
    before = Contamination.of(table).identity
    (tmp_path / "songs.jsonl").write_text(json.dumps({"question": QUESTION + " more"}))
    assert Contamination.of(table).identity != before


def test_sets_may_lie_on_a_store_and_none_finds_nothing() -> None:
    with fsspec.open("memory://sets/one.jsonl", "w") as file:
        file.write(json.dumps({"text": QUESTION}))
    table = EvaluationTable.model_validate({"sets": ({"path": "memory://sets/one.jsonl"},)})
    assert Contamination.of(table).check(SHARED) == "memory://sets/one.jsonl"
    nothing = Contamination.of(EvaluationTable())
    assert nothing.apply(SHARED) == (SHARED, None)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, "no such file or folder"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "a.jsonl, line 2: is not JSON"),
        ("b.jsonl", b'{"body": "x", "id": 1}', "`text` is no text; the record has body, id"),
        ("c.jsonl", b"[1]", "the record has no fields"),
        ("d.txt", b"only five words of text", "has 13 words in a row"),
        ("e.txt", b"caf\xe9", "can't decode"),
    ],
)
def test_what_is_wrong_with_a_set_is_said(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    table = EvaluationTable.model_validate({"sets": ({"path": str(path)},)})
    with pytest.raises(RequestError) as caught:
        Contamination.of(table)
    assert said in str(caught.value)
    assert "data.duplicates.evaluation" in str(caught.value) or "line 2" in str(caught.value)
