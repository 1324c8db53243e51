from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rostra.config.sources import Source
from rostra.data.reading import make_reader
from rostra.data.sources import SCHEMA, BadRecords
from rostra.errors import RequestError

Rows = list[dict[str, str]]


def read(source: dict[str, Any], bad: BadRecords | None = None) -> Rows:
    bad = bad or BadRecords("fail", lambda _: None)
    reader = make_reader(TypeAdapter(Source).validate_python(source), 0)
    rows: Rows = []
    for part in reader.parts(bad):
        for batch in reader.read(part, bad):
            assert batch.schema == SCHEMA
            rows += batch.to_pylist()
    return rows


def texts(rows: Rows) -> dict[str, str]:
    return {row["id"]: row["text"] for row in rows}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in" / "deep" / ".hidden").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("bee\r\n", newline="")
    (tmp_path / "in" / "a.MD").write_text("\ufeffay")
    (tmp_path / "in" / "deep" / "c.txt").write_text("sea é")
    (tmp_path / "in" / "deep" / ".hidden" / "h.txt").write_text("hidden")
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG\0")
    return tmp_path / "in"


def test_text_reads_a_folder_a_file_and_a_glob(folder: Path) -> None:
    whole = {"a.MD": "ay", "b.txt": "bee\r\n", "deep/c.txt": "sea é"}
    rows = read({"type": "text", "path": str(folder)})
    assert texts(rows) == whole
    assert [row["id"] for row in rows] == sorted(whole)
    assert {row["source"] for row in rows} == {"text:0"}
    assert texts(read({"type": "text", "path": str(folder / "b.txt")})) == {"b.txt": "bee\r\n"}
    globbed = read({"type": "text", "path": str(folder / "**" / "*.txt")})
    assert list(texts(globbed)) == ["b.txt", "deep/c.txt"]


def test_text_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("naïve", encoding="utf-16")
    assert texts(read({"type": "text", "path": str(path), "encoding": "utf-16"})) == {
        "a.txt": "naïve"
    }
    with pytest.raises(RequestError, match="'klingon' is no text encoding"):
        read({"type": "text", "path": str(path), "encoding": "klingon"})


def _bad_text(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "bad.txt"
    match kind:
        case "empty":
            path.write_text(" \n")
        case "binary":
            path.write_bytes(b"GIF\0\x01")
        case "encoding":
            path.write_bytes(b"good caf\xe9 bad")
        case "unreadable":
            path.symlink_to(tmp_path / "nowhere")
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "no such file or folder"),
        ("empty", "empty"),
        ("binary", "NUL at 3"),
        ("encoding", r"byte 8 \(0xe9\).*data.sources.0.encoding"),
    ],
)
def test_a_bad_text_file_is_named_with_what_to_do(tmp_path: Path, kind: str, said: str) -> None:
    path = _bad_text(tmp_path, kind)
    source = {"type": "text", "path": str(path)}
    with pytest.raises(RequestError, match=said) as caught:
        read(source)
    assert str(path) in str(caught.value)
    assert "data.on_bad_record" in str(caught.value)
    heard: list[str] = []
    bad = BadRecords("skip", heard.append)
    assert read(source, bad) == []
    assert bad.counts == {kind: 1}
    assert str(path) in heard[0]


def test_an_unreadable_file_and_a_folder_without_text(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no \.txt or \.md file"):
        read({"type": "text", "path": str(tmp_path)})
    with pytest.raises(RequestError, match="no file matches"):
        read({"type": "text", "path": str(tmp_path / "*.txt")})
    _bad_text(tmp_path, "unreadable")
    with pytest.raises(RequestError, match=r"bad.txt: cannot be read \(No such file"):
        read({"type": "text", "path": str(tmp_path)})


def test_many_skipped_are_announced_a_few_times(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 100)
    heard: list[str] = []
    bad = BadRecords("skip", heard.append)
    assert read({"type": "jsonl", "path": str(tmp_path)}, bad) == []
    assert bad.counts == {"no text": 100}
    assert len(heard) == bad.announced + 1


def test_jsonl_reads_lines_with_metadata(tmp_path: Path) -> None:
    lines = [{"text": "one", "url": "u"}, {"text": "zwei ü", "n": 2}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["\ufeff" + json.dumps(lines[0]), "", json.dumps(lines[1])]))
    rows = read({"type": "jsonl", "path": str(tmp_path)})
    assert texts(rows) == {"a.jsonl:1": "one", "a.jsonl:3": "zwei ü"}
    assert [json.loads(row["metadata"]) for row in rows] == [{"url": "u"}, {"n": 2}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "no text under 'text'"),
        (b'{"body": "a", "id": 3}', r"its keys: body, id.*data.sources.0.field"),
        (b'{"text": 5}', "no text under 'text'"),
        (b'{"text": " "}', "empty"),
        (b'{"text": "a\\ud800b"}', "surrogate"),
        (b'{"text": "\xff"}', "byte 10 is not UTF-8"),
        (b"\0\0\0", "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "three"}\n')
    with pytest.raises(RequestError, match=said) as caught:
        read({"type": "jsonl", "path": str(path)})
    assert f"{path}, line 2" in str(caught.value)
    bad = BadRecords("skip", lambda _: None)
    assert list(texts(read({"type": "jsonl", "path": str(path)}, bad))) == [
        "a.jsonl:1",
        "a.jsonl:3",
    ]
    assert bad.counts.total() == 1


def test_jsonl_of_c4(shared_data: Path) -> None:
    assert len(read({"type": "jsonl", "path": str(shared_data / "c4_demo.jsonl")})) == 300


def test_python_docs_are_the_library_without_tests() -> None:
    rows = read({"type": "python_docs"})
    ids = [row["id"] for row in rows]
    assert len(ids) == len(set(ids)) > 500
    assert ids[0].startswith("topics/")
    assert {"json/decoder.py", "this.py"} <= set(ids)
    places = {place for id in ids for place in id.split("/")[:-1]}
    assert places.isdisjoint({"test", "tests", "idle_test", "site-packages", "pydoc_data"})
    assert not any(sysconfig.get_path("stdlib") in id for id in ids)
    assert all(row["text"].strip() for row in rows)


def test_python_docs_do_not_depend_on_where_python_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Callable[[str], Path] = lambda name: tmp_path / name  # noqa: E731
    for name in ("here", "there"):
        (make(name) / "pkg" / "test").mkdir(parents=True)
        (make(name) / "pkg" / "m.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
        (make(name) / "pkg" / "test" / "t.py").write_text("x = 1")
        (make(name) / "bad.py").write_bytes(b"x = '\xff'\n")
        (make(name) / "empty.py").write_bytes(b"")
    found = []
    for name in ("here", "there"):
        monkeypatch.setattr(sysconfig, "get_path", lambda _, name=name: str(make(name)))
        found.append([row for row in read({"type": "python_docs"}) if "topics/" not in row["id"]])
    assert found[0] == found[1]
    assert texts(found[0]) == {"pkg/m.py": "# coding: latin-1\nx = 'é'\n"}
