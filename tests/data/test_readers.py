"""Every kind of source of documents, its files written by the libraries they come from."""

from __future__ import annotations

import gzip
import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tfrecord
import webdataset
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rostra.config.sources import JsonlSource, ParquetSource, Source
from rostra.data.readers.jsonl import JsonlReader
from rostra.data.readers.tables import ParquetReader
from rostra.data.reading import make_reader
from rostra.data.sources import SCHEMA, BadRecords, Reader
from rostra.errors import RequestError
from rostra.files import Retries
from stores import BadNetwork, S3Server, endpoint, upload, web

ROWS = [{"text": f"Text {k}, “quoted”\nand more", "url": f"u/{k}", "n": str(k)} for k in range(9)]


def rows_of(reader: Any, bad: BadRecords | None = None) -> list[dict[str, Any]]:
    bad = bad or BadRecords("fail", lambda _: None)
    rows = []
    assert isinstance(reader, Reader)
    for part in reader.parts(bad):
        for batch in reader.read(part, bad):
            assert batch.schema == SCHEMA
            rows += batch.to_pylist()
    return rows


def read(source: dict[str, Any], bad: BadRecords | None = None) -> list[dict[str, Any]]:
    return rows_of(make_reader(TypeAdapter(Source).validate_python(source), 0), bad)


def jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def gz(path: Path) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS[:4])
    with gzip.open(path, "at") as file:  # a second gzip member
        file.writelines(json.dumps(row) + "\n" for row in ROWS[4:])


def zst(path: Path) -> None:
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    packed = zstandard.ZstdCompressor()
    path.write_bytes(packed.compress(b"".join(lines[:4])) + packed.compress(b"".join(lines[4:])))


def parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)


def csv(path: Path) -> None:
    quoted = [[row[k].replace('"', '""') for k in ("text", "url", "n")] for row in ROWS]
    path.write_text("text,url,n\n" + "".join(f'"{a}","{b}","{c}"\n' for a, b, c in quoted))


def dataset(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


def tar(path: Path) -> None:
    with webdataset.TarWriter(str(path)) as out:
        for row in ROWS:
            more = {"url": row["url"], "n": row["n"]}
            key = f"deep/{row['n']}"
            out.write({"__key__": key, "txt": row["text"], "json": more, "jpg": b"\xff\xd8\0"})


def record(path: Path) -> None:
    out = tfrecord.TFRecordWriter(str(path))
    for row in ROWS:
        out.write({k: (v.encode(), "byte") for k, v in row.items()})
    out.close()


KINDS: dict[str, tuple[str, str, Callable[[Path], None], dict[str, Any]]] = {
    "jsonl": ("jsonl", "a.jsonl", jsonl, {}),
    "jsonl.gz": ("jsonl", "a.jsonl.gz", gz, {}),
    "jsonl.zst": ("jsonl", "a.json.zst", zst, {}),
    "parquet": ("parquet", "a.parquet", parquet, {"metadata": ("url", "n")}),
    "csv": ("csv", "a.csv", csv, {}),
    "dataset": ("dataset", "saved", dataset, {}),
    "webdataset": ("webdataset", "a.tar", tar, {}),
    "webdataset.gz": ("webdataset", "a.tar.gz", tar, {}),
    "webdataset.tgz": ("webdataset", "a.tgz", tar, {}),
    "tfrecord": ("tfrecord", "a.tfrecord", record, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", ["local", "s3", "http"])
def test_each_kind_gives_the_same_documents_from_every_store(
    kind: str, store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    type, name, write, keys = KINDS[kind]
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / name)
    source = {"type": type, "path": str(folder), **keys}
    if kind == "dataset":
        source["path"] += f"/{name}"
    found = read(source)
    assert [row["text"] for row in found] == [row["text"] for row in ROWS]
    metadata = [{k: v for k, v in row.items() if k != "text"} for row in ROWS]
    assert [json.loads(row["metadata"]) for row in found] == metadata
    assert len({row["id"] for row in found}) == len(ROWS)
    assert {row["source"] for row in found} == {f"{type}:0"}
    own = read({**source, "id_field": "url", "name": "mine"})
    assert [row["id"] for row in own] == [f"u/{k}" for k in range(9)]
    assert {row["source"] for row in own} == {"mine"}
    if store == "s3":
        url = request.getfixturevalue("s3")
        upload(folder, url)
        assert read({**source, "path": source["path"].replace(str(folder), url)}) == found
    elif store == "http":
        with web(folder) as url:
            path = source["path"].replace(str(folder), url.rstrip("/"))
            assert read({**source, "path": path}) == found


def test_sources_have_names_of_their_own(section: Callable[..., Any]) -> None:
    one = {"type": "text", "path": "a"}
    section(one, {**one, "name": "other"}, {**one, "type": "alpaca"})
    with pytest.raises(ValueError, match="two sources have the name 'text:0'"):
        section(one, {**one, "name": "text:0"})


def test_text_and_books_from_a_store(s3: str, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "76.txt").write_text("Huck\n")
    upload(tmp_path, s3)
    (book,) = read({"type": "gutenberg", "path": s3})
    (text,) = read({"type": "text", "path": f"{s3}/1"})
    assert (book["id"], text["id"], book["text"], text["text"]) == (
        "76",
        "76.txt",
        "Huck\n",
        "Huck\n",
    )


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=30), size=st.integers(1, 70))
def test_ranges_of_lines_give_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], size: int
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "a.jsonl"
    texts = [f"{number:02d}" + "x" * length for number, length in enumerate(lengths)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    source = JsonlSource(type="jsonl", path=str(path))
    reader = JsonlReader(0, source, range_bytes=size)
    parts = reader.parts(BadRecords("fail", print))
    assert sum(part.size for part in parts) == path.stat().st_size
    assert len({part.name for part in parts}) == len(parts)
    found = rows_of(reader)
    assert [row["text"] for row in found] == texts
    if len(parts) > 1:  # an id does not depend on how the file was split
        assert found == rows_of(replace(reader, range_bytes=size + 1)) or size + 1 > len(texts)


def test_row_groups_are_parts(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet")
    source = ParquetSource(type="parquet", path=str(tmp_path))
    whole, split = ParquetReader(0, source), ParquetReader(0, source, range_bytes=1)
    parts = split.parts(BadRecords("fail", print))
    assert [(part.start, part.stop) for part in parts] == [(k, k + 1) for k in range(5)]
    assert rows_of(split) == rows_of(whole)
    last = list(split.read(parts[-1], BadRecords("fail", print)))
    assert [row["id"] for row in last[0].to_pylist()] == ["a.parquet:9"]


def test_a_range_without_a_row_is_no_empty_file(tmp_path: Path) -> None:
    """Some writers end a file with a row group of none."""
    table = pa.Table.from_pylist(ROWS)
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as out:
        for rows in (table, table.slice(0, 0)):
            out.write_table(rows)
    source = ParquetSource(type="parquet", path=str(tmp_path))
    split = ParquetReader(0, source, range_bytes=1)
    assert len(split.parts(BadRecords("fail", print))) == 2
    assert [row["text"] for row in rows_of(split)] == [row["text"] for row in ROWS]


def test_a_dataset_like_those_of_the_hub_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()
    for number in range(3):
        jsonl(folder / f"train-{number}.jsonl")
    source = {"type": "dataset", "path": str(folder)}
    found = read(source)
    assert [row["text"] for row in found] == [row["text"] for row in ROWS] * 3
    assert found[9]["id"] == "default-train-00001:1"
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    reader = make_reader(TypeAdapter(Source).validate_python(source), 0)
    before = reader.parts(BadRecords("fail", print))[0].fingerprint()
    jsonl(folder / "train-3.jsonl")
    assert reader.parts(BadRecords("fail", print))[0].fingerprint() != before
    with pytest.raises(RequestError, match=r"no such dataset could be loaded \("):
        read({**source, "split": "dev"})


def test_values_of_a_tf_example(tmp_path: Path) -> None:
    out = tfrecord.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    numbers = {"f": ([1.5, -2.0], "float"), "i": ([3, -4, 1 << 40], "int"), "j": (7, "int")}
    out.write({"text": (b"one", "byte"), "raw": (b"\xff", "byte"), **numbers})
    out.close()
    (row,) = read({"type": "tfrecord", "path": str(tmp_path)})
    assert json.loads(row["metadata"]) == {
        "f": [1.5, -2.0], "i": [3, -4, 1 << 40], "j": 7, "raw": None,
    }  # fmt: skip


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 5 // 8])


def flip(place: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[place] ^= 1
        path.write_bytes(raw)

    return change


def at_a_border(path: Path) -> None:
    """A tar without its end, cut between two members."""
    path.write_bytes(path.read_bytes()[:1024])


@pytest.mark.parametrize(
    ("kind", "harm", "said"),
    [
        ("jsonl.gz", half, "Truncated compressed stream"),
        ("jsonl.gz", flip(-6), "incorrect data check"),
        ("jsonl.zst", half, "Truncated compressed stream"),
        ("parquet", half, "cannot be read"),
        ("webdataset", half, "(unexpected end of data|ends without its end mark)"),
        ("webdataset", at_a_border, "ends without its end mark"),
        ("webdataset", flip(512 * 2 + 2), "bad checksum"),
        ("webdataset.gz", half, "Truncated compressed stream"),
        ("tfrecord", half, "truncated: it ends within record 6"),
        ("tfrecord", flip(3), "record 1: the checksum of its length"),
        ("tfrecord", flip(40), "record 1: the checksum of its data"),
        ("tfrecord", lambda path: path.write_bytes(b""), "empty"),
        ("webdataset", lambda path: path.write_bytes(b"x" * 2000), "broken or truncated tar"),
    ],
)
def test_broken_and_truncated_files_are_named_or_counted(
    tmp_path: Path, kind: str, harm: Callable[[Path], None], said: str
) -> None:
    type, name, write, _ = KINDS[kind]
    write(tmp_path / name)
    harm(tmp_path / name)
    source = {"type": type, "path": str(tmp_path)}
    with pytest.raises(RequestError, match=f"{name}: .*{said}"):
        read(source)
    heard: list[str] = []
    bad = BadRecords("skip", heard.append)
    assert len(read(source, bad)) < len(ROWS)
    assert bad.counts.total() == len(heard) == 1


@pytest.mark.parametrize(
    ("type", "name", "content", "said"),
    [
        ("csv", "a.csv", b"body\nx\n", r"a.csv, row 1: has no text under 'text' \(its keys: body"),
        ("csv", "a.csv", b"text,b\nx\n", "a.csv, row 1: has fewer fields"),
        ("jsonl", "a.jsonl", b'{"text": "x"}', "a.jsonl, line 1: has nothing under 'key'"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, type: str, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=said):
        read({"type": type, "path": str(tmp_path), "id_field": "key"})


def test_a_parquet_file_without_the_column_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet")
    with pytest.raises(RequestError, match=r"has no column 'body' \(its columns: text, url, n\)"):
        read({"type": "parquet", "path": str(tmp_path), "field": "body"})


def test_records_that_are_no_example(tmp_path: Path) -> None:
    out = tfrecord.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    out.write({"text": (b"good", "byte")})
    out.close()
    frame = (tmp_path / "a.tfrecord").read_bytes()
    (length,) = struct.unpack("<Q", frame[:8])
    from rostra.data.readers.tfrecord import checksum, example

    data = frame[12 : 12 + length]
    assert example(data) == {"text": "good"}
    masked, generator = checksum("data.sources.0"), random.Random(1)
    for _ in range(300):  # whatever the bytes, an end or values
        spoilt = bytearray(data)
        spoilt[generator.randrange(length)] = generator.randrange(256)
        size = struct.pack("<Q", length)
        (tmp_path / "a.tfrecord").write_bytes(
            size + masked(size).to_bytes(4, "little") + spoilt
            + masked(bytes(spoilt)).to_bytes(4, "little")
        )  # fmt: skip
        read({"type": "tfrecord", "path": str(tmp_path)}, BadRecords("skip", lambda _: None))


def test_a_bad_network_changes_nothing(
    s3: str, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds at once, through a proxy that resets connections and answers 503."""
    monkeypatch.setattr(Retries, "delays", lambda _: iter([0.01] * 40))
    sources = []
    for kind, (type, name, write, keys) in KINDS.items():
        folder = tmp_path / kind
        folder.mkdir()
        write(folder / name)
        below = f"/{kind}/{name}" if kind == "dataset" else f"/{kind}"
        sources.append(({"type": type, **keys}, below))
    upload(tmp_path, s3)
    local = [read({**source, "path": f"{tmp_path}{below}"}) for source, below in sources]
    with BadNetwork(s3_server.port, 40, 2000) as network, endpoint(network.address):
        assert [read({**source, "path": f"{s3}{below}"}) for source, below in sources] == local
        assert network.broken == 40
