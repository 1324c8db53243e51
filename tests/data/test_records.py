from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rostra.config.sources import AlpacaSource
from rostra.data.records import find_records, read_records
from rostra.data.sources import BadRecords
from rostra.errors import RequestError

ROWS = [{"instruction": f"Say {k}, twice", "output": f'{k}\n"{k}" é'} for k in range(3)]


def records(path: Path, bad: BadRecords | None = None, **keys: Any) -> list[tuple[str, Any]]:
    bad = bad or BadRecords("fail", print)
    source = AlpacaSource(type="alpaca", path=str(path), **keys)
    parts = find_records(source, "data.sources.0", bad)
    found = [r for p in parts for r in read_records(p, source, "data.sources.0", bad)]
    return [(record.where, record.values) for record in found]


def _json(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def _wrapped(path: Path) -> None:
    path.write_text("\ufeff" + json.dumps({"version": "1", "data": ROWS}))


def _lines(path: Path) -> None:
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")


def _csv(path: Path) -> None:
    rows = [[r["instruction"], r["output"].replace('"', '""')] for r in ROWS]
    path.write_text("instruction,output\n" + "".join(f'"{a}","{b}"\n' for a, b in rows))


def _parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)


@pytest.mark.parametrize(
    "name, write, unit",
    [
        ("a.json", _json, "record"),
        ("b.json", _wrapped, "record"),
        ("c.json", _lines, "record"),  # JSON lines under another name
        ("d.jsonl", _lines, "line"),
        ("e.csv", _csv, "row"),
        ("f.parquet", _parquet, "row"),
    ],
)
def test_every_format_gives_the_same_records(
    tmp_path: Path, name: str, write: Callable[[Path], None], unit: str
) -> None:
    path = tmp_path / name
    write(path)
    assert records(path) == [(f"{path}, {unit} {k}", row) for k, row in enumerate(ROWS, 1)]


def test_datasets_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved.select([0, 1]), test=saved.select([2])).save_to_disk(
        tmp_path / "two"
    )
    assert [values for _, values in records(tmp_path / "one")] == ROWS
    (where, values), *more = records(tmp_path / "two", split="test")
    assert (values, more, where[-7:]) == (ROWS[2], [], ", row 1")
    with pytest.raises(RequestError, match=r"no split 'dev' .*it has train, test"):
        records(tmp_path / "two", split="dev")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(RequestError, match=r"state.json: is not what the datasets library writes"):
        records(tmp_path / "one")


def test_a_folder_like_those_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files: x.jsonl\n---\nA card.\n"
    )
    _lines(folder / "x.jsonl")
    _lines(folder / "unnamed.jsonl")
    found = records(folder, subset="small")
    assert [values for _, values in found] == ROWS
    for slice, expected in (("train[:34%]", ROWS[:1]), ("train[1:]", ROWS[1:])):
        for _ in range(2):  # made, then found
            found = records(folder, subset="small", split=slice)
            assert [values for _, values in found] == expected
    for wrong in ({"subset": "large"}, {"subset": "small", "split": "train[:x]"}):
        with pytest.raises(RequestError, match=r"no such dataset could be loaded \("):
            records(folder, **wrong)


def test_files_of_the_split_are_taken(tmp_path: Path) -> None:
    for name in ("train-00.jsonl", "test-00.jsonl", "validation.jsonl"):
        _lines(tmp_path / name)
    assert {Path(where.split(",")[0]).name for where, _ in records(tmp_path)} == {"train-00.jsonl"}
    assert len(records(tmp_path, split="validation")) == 3
    with pytest.raises(RequestError, match="no file of split 'dev'"):
        records(tmp_path, split="dev")


GOOD = b'{"a": "b"}'


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", GOOD + b'\n{"a": "\xff"}\n', "a.jsonl, line 2: 'a' is not UTF-8"),
        ("b.json", b'[{"a": "b"},\n{"a": ["\xff"]}]', "b.json, record 2: 'a' is not UTF-8"),
        ("c.json", b'[{"a": "\\ud800"}]', "c.json, record 1: 'a' is not UTF-8"),
        ("d.csv", b"a,b\n1,2\n3,\xff\n", "d.csv, row 2: 'b' is not UTF-8"),
        ("e.csv", b"a,b\n1,2\n3\n", "e.csv, row 2: has fewer fields than the header"),
        ("f.csv", b'a,b\n1,2\n3,"4\n', "f.csv, row 2: not CSV"),
        ("g.jsonl", GOOD + b"\n\n{'a': 1}\n", "g.jsonl, line 3: not JSON"),
        ("h.json", b'[{"a": 1},\n{"a": }]', r"h.json: not JSON \(.* at line 2, column 7"),
        ("i.json", b'[{"a": 1}, "b"]', "i.json, record 2: is no object but a str"),
        ("j.json", b'{"a": 1}', "j.json: holds no list of records"),
        ("k.jsonl", b" \n", "k.jsonl: holds no record"),
        ("l.parquet", b"PAR1", "l.parquet: cannot be read"),
        ("m.xyz", b"1", "m.xyz: its ending tells no format"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RequestError, match=message):
        records(path)
    skipped = BadRecords("skip", lambda _: None)
    assert len(records(path, skipped)) == (len(skipped.examples) == 1 and name[0] in "abdefgi")
    assert sum(skipped.counts.values()) == 1


def test_a_byte_in_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    pq.write_table(pa.table({"a": text}), tmp_path / "a.parquet")
    with pytest.raises(RequestError, match=r"a.parquet, row 2: .* is not UTF-8"):
        records(tmp_path / "a.parquet")


def test_columns_give_no_keys_that_a_record_lacks(tmp_path: Path) -> None:
    rows = [{"m": [{"role": "user", "content": "a"}, {"role": "tool", "name": "b"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [values for _, values in records(tmp_path / "a.parquet")] == rows


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    for library in ("huggingface_hub.constants", "datasets.config"):  # read when imported
        monkeypatch.setattr(f"{library}.HF_HUB_OFFLINE", True)
    with pytest.raises(RequestError, match=r"nothing.json: no such file or folder"):
        records(tmp_path / "nothing.json")
    with pytest.raises(RequestError, match=r"somebody/nothing: no such dataset could be loaded"):
        records(Path("somebody/nothing"))
    with pytest.raises(RequestError, match=r"somebody/nothing: no such dataset could be loaded"):
        records(Path("somebody/nothing"), split="train[:10]")
    _lines(tmp_path / "some.jsonl")
    with pytest.raises(RequestError, match=r"'train\[:10\]' is a slice, and .* not of the hub"):
        records(tmp_path / "some.jsonl", split="train[:10]")
