"""MosaicML Streaming's shards, written by its own library and by hand."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rostra.config.sources import TokensSource
from rostra.data.formats import TokensReader
from rostra.data.sources import BadRecords
from rostra.errors import RequestError
from support import need

Write = Callable[..., None]
ROWS = [[7, 8, 9], [1], [300, 5], [60000] * 300, [2, 2]]


@pytest.fixture
def mds_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library's writer. Its package imports torchvision, which a torch for the CPU cannot
    have beside it: so only what is below the package is imported."""
    found = find_spec("streaming")
    need(found, "mosaicml-streaming")
    assert found is not None
    before = set(sys.modules)
    package = ModuleType("streaming")
    package.__path__ = list(found.submodule_search_locations or [])
    monkeypatch.setitem(sys.modules, "streaming", package)
    try:
        from streaming.base.format.mds.writer import MDSWriter
    except ImportError as error:
        need(None, str(error.name))
    yield MDSWriter
    for name in set(sys.modules) - before:
        if name.startswith("streaming."):
            del sys.modules[name]


def tokens(path: Path | str, policy: Any = "fail", **keys: Any) -> dict[str, list[int]]:
    values = {"type": "tokens", "path": str(path), "format": "mds", **keys}
    source = TokensReader(0, TokensSource.model_validate(values))
    bad, found = BadRecords(policy, lambda _: None), {}
    for part in source.parts(bad):
        for batch in source.read(part, bad):
            ids, lists = (batch.column(name).to_pylist() for name in ("id", "tokens"))
            assert not set(ids) & set(found)
            found |= dict(zip(ids, lists, strict=True))
    return found


def test_what_the_library_writes_is_read(mds_writer: Any, tmp_path: Path) -> None:
    """Every way that it has to write token ids, compress and hash; several shards."""
    forms: dict[str, tuple[str, Callable[[list[int]], Any], dict[str, Any]]] = {
        "any": ("ndarray", lambda row: np.array(row, np.int64), {}),
        "u16": ("ndarray:uint16", lambda row: np.array(row, np.uint16), {}),
        "i32": ("ndarray:int32", lambda row: np.array(row, np.int32), {}),
        "json": ("json", list, {}),
        "bytes": ("bytes", lambda row: np.array(row, "<i8").tobytes(), {"dtype": "int64"}),
    }
    ways = [
        (None, []),
        ("zstd:7", ["sha1", "xxh64"]),
        ("gz", ["sha256"]),
        ("br:1", ["md5"]),
        ("snappy", ["blake2s"]),
        ("bz2", ["xxh3_64"]),
    ]
    for number, (compression, hashes) in enumerate(ways):
        folder = tmp_path / str(number) / "x"
        columns = {name: form[0] for name, form in forms.items()}
        with mds_writer(
            columns={**columns, "id": "str" if number else "int", "z": "pkl", "f": "float64"},
            out=str(folder),
            compression=compression,
            hashes=hashes,
            size_limit=4000,
        ) as writer:
            for k, row in enumerate(ROWS):
                values = {name: form[1](row) for name, form in forms.items()}
                id = f"é{k}" if number else k
                writer.write({**values, "id": id, "z": {1, 2}, "f": 0.5})
        assert len(list(folder.glob("shard.*"))) > 2
        expected = {(f"é{k}" if number else str(k)): row for k, row in enumerate(ROWS)}
        for name, (_, _, keys) in forms.items():
            assert tokens(folder.parent, field=name, **keys) == expected
        with pytest.raises(RequestError, match=r"'z' pickled \(pkl\), which could run any code"):
            tokens(folder, field="z")
        with pytest.raises(RequestError, match="'f' as float64, and token ids are"):
            tokens(folder / "index.json", field="f")
        with pytest.raises(RequestError, match=r"'bytes' as plain bytes; set .*`dtype`"):
            tokens(folder, field="bytes")


def test_fixed_shapes_and_folders_of_folders(mds_writer: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        columns = {"tokens": "ndarray:uint16:4", "at": "uint32"}
        with mds_writer(columns=columns, out=str(tmp_path / name)) as writer:
            for k in range(3):
                writer.write({"tokens": np.arange(k, k + 4, dtype=np.uint16), "at": np.uint32(9)})
    expected = {f"{n}/shard.00000.mds:{k + 1}": [*range(k, k + 4)] for n in "ab" for k in range(3)}
    assert tokens(tmp_path) == expected
    merged = []
    for name in ("a", "b"):
        for shard in json.loads((tmp_path / name / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{name}/{shard['raw_data']['basename']}"
            merged.append(shard)
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": merged}))
    assert tokens(tmp_path) == expected  # each shard once


def by_hand(
    folder: Path, hashed: bool, rows: list[bytes], encoding: str = "ndarray:uint16"
) -> Path:
    """One shard, from the format's definition."""
    head = json.dumps({"column_names": ["tokens"]}).encode()
    samples = [struct.pack("<I", len(row)) + row for row in rows]
    first = 4 + 4 * (len(rows) + 1) + len(head)
    offsets = [first + sum(map(len, samples[:k])) for k in range(len(rows) + 1)]
    raw = struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + head + b"".join(samples)
    hashes = {"sha1": hashlib.sha1(raw).hexdigest()} if hashed else {}
    about = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": list(hashes),
        "samples": len(rows),
        "column_names": ["tokens"],
        "column_encodings": [encoding],
        "column_sizes": [None],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": hashes},
        "zip_data": None,
    }
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [about]}))
    (folder / "shard.00000.mds").write_bytes(raw)
    return folder / "shard.00000.mds"


def array(*row: int) -> bytes:
    """With a shape of one axis, in a byte."""
    return bytes([1 << 2, len(row)]) + struct.pack(f"<{len(row)}H", *row)


def test_flips_and_cuts_are_found(tmp_path: Path) -> None:
    rows = [array(*range(k, 2 * k + 5)) for k in range(20)]
    path = by_hand(tmp_path, True, rows)
    expected = {f"shard.00000.mds:{k + 1}": [*range(k, 2 * k + 5)] for k in range(20)}
    assert tokens(tmp_path) == expected
    good, index = path.read_bytes(), tmp_path / "index.json"
    told, chance = index.read_text(), random.Random(5)
    for _ in range(40):
        flipped = bytearray(good)
        flipped[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(RequestError, match=r"shard\.00000\.mds: .*its sha1 is another"):
            tokens(tmp_path)
        path.write_bytes(good[: chance.randrange(len(good))])
        with pytest.raises(RequestError, match=r"bytes, and its index says"):
            tokens(tmp_path)
        index.write_text(told[: chance.randrange(len(told))])
        with pytest.raises(RequestError, match=r"index\.json: is no index of MDS"):
            tokens(tmp_path)
        index.write_text(told)
    path.unlink()
    with pytest.raises(RequestError, match=r"index\.json: names shard\.00000\.mds, which is not"):
        tokens(tmp_path)
    assert tokens(tmp_path, "skip") == {}


@pytest.mark.parametrize(
    ("rows", "change", "said"),
    [
        ([array(1)], {"samples": 2}, "has no 2 samples in order"),
        ([array(1)], {"format": "csv"}, "of format csv, version 2; MDS is read"),
        ([array(1)], {"compression": "lz4"}, "compression lz4, which is not known"),
        ([array(1)], {"column_sizes": None}, "nothing usable of a shard"),
        ([array(1)], {"column_encodings": ["ndarray:float32"]}, "float32, and token ids are whole"),
        ([array(1)], {"column_encodings": ["png"]}, "'tokens' as png, and token ids are"),
        ([array(1)], {"column_sizes": [3]}, "sample 0 has 8 bytes, and its columns have 3"),
        ([bytes([2 << 2, 1, 2, 0, 0, 0, 0])], {}, "sample 0 holds 1x2 values"),
        ([array(1), array(2)[:-1]], {}, "sample 1 "),
        ([array(1), b"\x04\x09\x00\x00"], {}, "sample 1 "),
        ([b""], {}, "sample 0 "),
        ([b"[1, true]"], {"column_encodings": ["json"]}, "sample 0 has no list of whole numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(
    rows: list[bytes], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    by_hand(tmp_path, False, rows)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0] |= change
    if change.get("compression"):
        index["shards"][0]["zip_data"] = index["shards"][0]["raw_data"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(RequestError, match=said):
        tokens(tmp_path)


def test_a_sum_that_cannot_be_taken_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand(tmp_path, False, [array(1)])
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"] = {"xxh64": "0" * 16}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(RequestError, match="xxh64 is another"):
        tokens(tmp_path)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(RequestError, match="install the package xxhash"):
        tokens(tmp_path)
