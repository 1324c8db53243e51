"""Prepared data in the formats of other systems, and back."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rostra.config.data import DataSection
from rostra.config.sources import TokensSource
from rostra.data import Prepared, prepare
from rostra.data.formats import TokensReader, parts, write_as
from rostra.data.formats.megatron import Index, MegatronWriter, read_megatron
from rostra.data.formats.rows import Documents, Row
from rostra.data.formats.tables import read_parquet, write_parquet
from rostra.data.formats.webdataset import read_tar, write_tar
from rostra.data.sources import BadRecords
from rostra.errors import RequestError
from rostra.files import join
from support import need, refused, rostra

Found = dict[str, list[int]]
WRITTEN = ("webdataset", "parquet", "megatron")


def reader(path: Path | str, format: str, **keys: Any) -> TokensReader:
    values = {"type": "tokens", "path": str(path), "format": format, **keys}
    return TokensReader(0, TokensSource.model_validate(values))


def tokens(path: Path | str, format: str, policy: Any = "fail", **keys: Any) -> Found:
    """The documents at `path`, by id; parts are read as another process would."""
    source, bad = reader(path, format, **keys), BadRecords(policy, lambda _: None)
    found: Found = {}
    for part in pickle.loads(pickle.dumps(source.parts(bad))):
        for batch in pickle.loads(pickle.dumps(source)).read(part, bad):
            assert batch.column("source").unique().to_pylist() == ["tokens:0"]
            ids, lists = (batch.column(name).to_pylist() for name in ("id", "tokens"))
            assert not set(ids) & set(found)
            found |= dict(zip(ids, lists, strict=True))
    return found


def held(prepared: Prepared, split: str = "train") -> Found:
    shards = getattr(prepared, split)
    found: Found = {}
    for shard in map(shards.__getitem__, range(len(shards))):
        for row in range(len(shard.offsets) - 1):
            here = slice(shard.offsets[row], shard.offsets[row + 1])
            found[shard.id(row)] = shard.tokens[here].tolist()
    return found


@pytest.fixture
def prepared(corpus: Path, section: Callable[..., DataSection]) -> Prepared:
    source = {"type": "text", "path": str(corpus)}
    return prepare(section(source, prepare={"shard_tokens": 900}), None, lambda _: None)


@st.composite
def shards(draw: st.DrawFn) -> Documents:
    """A shard: of documents, some empty, or of examples."""
    dtype = draw(st.sampled_from([np.uint16, np.uint32]))
    top = min(np.iinfo(dtype).max, 2**31 - 1)
    number = st.integers(0, int(top))
    rows = draw(st.lists(st.lists(number, max_size=9), max_size=6))
    ids = draw(st.lists(st.text(max_size=8), min_size=len(rows), max_size=len(rows)))
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    flat = np.array([n for row in rows for n in row], dtype)
    weight = st.floats(0, 2, width=32)
    weights = draw(st.none() | st.lists(weight, min_size=len(flat), max_size=len(flat)))
    kept = None if weights is None else np.array(weights, np.float32)
    return Documents(ids, [len(id) for id in ids], flat, offsets, kept)


def as_tar(documents: Documents, folder: Path) -> Iterator[Row]:
    write_tar(documents, folder / "x.tar")
    again = (folder / "x.tar").read_bytes()
    write_tar(documents, folder / "x.tar")
    assert (folder / "x.tar").read_bytes() == again
    with (folder / "x.tar").open("rb") as file:
        yield from read_tar(file, "tokens")


def as_parquet(documents: Documents, folder: Path) -> Iterator[Row]:
    write_parquet(documents, folder / "x.parquet")
    with (folder / "x.parquet").open("rb") as file:
        yield from read_parquet(file, 0, None, "tokens")


def as_megatron(documents: Documents, folder: Path) -> Iterator[Row]:
    writer = MegatronWriter(folder / "x", documents.tokens.dtype.type)
    writer.add(documents)
    writer.close()
    idx, bin = ((folder / f"x.{end}").read_bytes() for end in ("idx", "bin"))
    index = Index.of(lambda start, stop: idx[start:stop], len(idx))
    assert index.size(lambda start, stop: idx[start:stop]) == len(bin)
    middle = len(documents) // 2
    for start, stop in ((0, middle), (middle, len(documents))):
        yield from read_megatron(index, lambda a, z: idx[a:z], lambda a, z: bin[a:z], start, stop)


def same(values: NDArray[Any] | None, others: NDArray[Any] | None) -> bool:
    if values is None or others is None:
        return values is others
    return np.array_equal(values, others)


@settings(max_examples=60)
@given(shards(), st.sampled_from([as_tar, as_parquet, as_megatron]))
def test_what_is_written_is_read_back(documents: Documents, form: Callable[..., Any]) -> None:
    with TemporaryDirectory() as folder:
        rows = list(form(documents, Path(folder)))
    assert len(rows) == len(documents)
    for number, row in enumerate(rows):
        expected, weights = documents.row(number)
        assert np.array_equal(row.tokens, expected)
        if form is not as_megatron:  # which has neither ids nor weights
            assert row.id == documents.ids[number]
            assert same(row.weights, weights)


@pytest.mark.parametrize("format", WRITTEN)
def test_prepared_data_moves_out_and_in(
    format: str, prepared: Prepared, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    said = write_as(prepared, format, str(out))
    files = [path for path in out.rglob("*") if path.is_file()]
    assert said["files"] == len(files) - 1  # the manifest names the others
    train, kept = held(prepared), held(prepared, "held_out")
    ending = {"webdataset": "tar", "megatron": "idx"}.get(format, format)
    whole, apart = tokens(out, format), tokens(out / f"held_out*.{ending}", format)
    if format == "megatron":
        train, kept = (
            {f"{name}:{n}": found for n, found in enumerate(rows.values(), 1)}
            for name, rows in (("train", train), ("held_out", kept))
        )
        assert tokens(out / "train", format) == tokens(out / "train.bin", format) == whole
    assert whole == train
    assert apart == kept

    monkeypatch.setattr(parts, "PART_BYTES", 700)  # now files are read in parts
    monkeypatch.setattr("rostra.data.formats.tables.GROUP_TOKENS", 300)
    split = tmp_path / "split"
    write_as(prepared, format, str(split))
    count = len(reader(split, format).parts(BadRecords("fail", pytest.fail)))
    assert count == len(prepared.train) if format == "webdataset" else count > len(prepared.train)
    assert tokens(split, format) == train

    before = {path: path.stat().st_mtime_ns for path in files}
    assert write_as(prepared, format, str(out)) == said  # it is there already
    assert before == {path: path.stat().st_mtime_ns for path in files}
    assert write_as(prepared, format, join(s3, "out"))["files"] == said["files"]
    assert tokens(join(s3, "out"), format) == train
    path = next(out.glob(f"train*.{ending}"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RequestError, match=rf"{path.name}: has .* bytes, and its manifest says"):
        tokens(out, format)
    path.unlink()
    with pytest.raises(RequestError, match="which its manifest names"):
        tokens(out, format)


def test_what_was_written_is_a_source_of_tokens(
    prepared: Prepared, tmp_path: Path, section: Callable[..., DataSection]
) -> None:
    """Prepared once more under the tokenizer beside them, the documents are the same."""
    out = tmp_path / "out"
    write_as(prepared, "parquet", str(out))
    source = {"type": "tokens", "format": "parquet", "path": str(out)}
    pretrained = {"pretrained": str(out / "tokenizer")}
    again = prepare(section(source, tokenizer=pretrained, held_out=0), None, lambda _: None)
    assert held(again) == held(prepared)
    assert again.tokenizer_hash == prepared.tokenizer_hash


def test_a_cache_folder_is_read_like_the_others(prepared: Prepared) -> None:
    assert tokens(prepared.folder, "arrow") == held(prepared)
    source = reader(prepared.folder, "arrow")
    source.check_tokenizer(prepared.tokenizer_hash)
    with pytest.raises(RequestError, match=r"data\.sources\.0: .* another tokenizer"):
        source.check_tokenizer("0" * 64)
    with pytest.raises(RequestError, match=r"Set data\.tokenizer\.pretrained"):
        source.check_tokenizer(None)


def test_where_something_else_lies_nothing_is_written(
    prepared: Prepared, tmp_path: Path, corpus: Path
) -> None:
    before = sorted(path.read_bytes() for path in corpus.iterdir())
    with pytest.raises(RequestError, match="holds something else"):
        write_as(prepared, "parquet", str(corpus))
    assert sorted(path.read_bytes() for path in corpus.iterdir()) == before
    write_as(prepared, "parquet", str(tmp_path / "out"))
    with pytest.raises(RequestError, match="holds something else"):
        write_as(prepared, "webdataset", str(tmp_path / "out"))
    with pytest.raises(RequestError, match="formats are: webdataset, parquet, megatron"):
        write_as(prepared, "mds", str(tmp_path / "mds"))
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"--output .*: (cannot be written|holds)"):
        write_as(prepared, "parquet", str(tmp_path / "file" / "below"))


def test_examples_keep_their_weights(tmp_path: Path, section: Callable[..., DataSection]) -> None:
    records = [{"instruction": f"Say {n}", "output": f"{n} " * (n % 5 + 1)} for n in range(40)]
    (tmp_path / "alpaca.json").write_text(json.dumps(records))
    source = {"type": "alpaca", "path": str(tmp_path / "alpaca.json")}
    prepared = prepare(section(source, sequence_length=256), None, lambda _: None)
    shard = prepared.train[0]
    for format, suffix, read in (
        ("parquet", "parquet", lambda file: read_parquet(file, 0, None, "tokens")),
        ("webdataset", "tar", lambda file: read_tar(file, "tokens")),
    ):
        write_as(prepared, format, str(tmp_path / format))
        with (tmp_path / format / f"train-00000.{suffix}").open("rb") as file:
            for number, row in enumerate(read(file)):
                expected = Documents.of(shard).row(number)
                assert same(row.tokens, expected[0])
                assert same(row.weights, expected[1])
        with pytest.raises(RequestError, match=r"examples with weights.*type: tokenized"):
            tokens(tmp_path / format, format)
    with pytest.raises(RequestError, match="no place for their weights"):
        write_as(prepared, "megatron", str(tmp_path / "megatron"))
    back = {"type": "tokenized", "path": str(tmp_path / "parquet")}
    own = {"pretrained": str(tmp_path / "parquet" / "tokenizer")}
    again = prepare(section(back, tokenizer=own, held_out=0.0), None, pytest.fail).train[0]
    for ours, theirs in ((again.tokens, shard.tokens), (again.weights, shard.weights)):
        assert same(ours, theirs)
    assert again.offsets.tolist() == shard.offsets.tolist()


def test_the_command_writes_and_tells(
    corpus: Path, tmp_path: Path, tiny_config: Callable[..., Path]
) -> None:
    config, out = tiny_config(corpus), tmp_path / "out"
    done = rostra("prepare", config, "--as", "parquet", "--output", out, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    rows = sum(pq.read_metadata(path).num_rows for path in out.glob("train-*.parquet"))
    assert rows == said["train"]["documents"] > 0
    assert said["written"]["path"] == str(out)
    refused(rostra("prepare", config, "--as", "parquet"), "--as and --output go together")
    refused(rostra("prepare", config, "--as", "csv", "--output", out), "no such format")


@pytest.fixture
def tiny_config(tmp_path: Path) -> Callable[[Path], Path]:
    def write(corpus: Path) -> Path:
        config = {
            "run": {"name": "moved", "output": str(tmp_path / "run")},
            "model": {"preset": "tiny"},
            "data": {
                "sources": [{"type": "text", "path": str(corpus)}],
                "tokenizer": {"vocabulary": 300},
                "sequence_length": 32,
                "cache": str(tmp_path / "cache"),
            },
            "train": {"steps": 1, "global_batch_size": 1},
        }
        path = tmp_path / "moved.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        return path

    return write


@pytest.mark.parametrize("format", [*WRITTEN, "arrow"])
def test_flips_and_cuts_are_found(format: str, prepared: Prepared, tmp_path: Path) -> None:
    """Every flip by the sums in the manifest; every cut also without one."""
    out = tmp_path / "out"
    if format == "arrow":
        out.mkdir()
        path = out / "train-00000.arrow"
        path.write_bytes((Path(prepared.folder) / path.name).read_bytes())
        manifest = Path(prepared.folder) / "manifest.json"
        (out / manifest.name).write_bytes(manifest.read_bytes())
    else:
        write_as(prepared, format, str(out))
        ending = {"webdataset": "-00000.tar", "parquet": "-00000.parquet", "megatron": ".idx"}
        path = out / f"train{ending[format]}"
    good, expected, chance = path.read_bytes(), tokens(path, format), random.Random(7)

    def found(content: bytes) -> bool:
        path.write_bytes(content)
        try:
            return tokens(path, format) == expected
        except RequestError as error:
            assert str(out / "train") in str(error)
            return False

    for _ in range(25):
        place, bit = chance.randrange(len(good)), chance.randrange(8)
        flipped = bytearray(good)
        flipped[place] ^= 1 << bit
        assert not found(bytes(flipped)), place
    if format == "megatron":
        path.write_bytes(good)
        data = path.with_suffix(".bin")
        raw = data.read_bytes()
        data.write_bytes(raw[:7] + bytes([raw[7] ^ 1]) + raw[8:])
        with pytest.raises(RequestError, match=r"train\.bin: is another than its manifest says"):
            tokens(path, format)
        data.write_bytes(raw)
    (out / "manifest.json").unlink()
    end = len(good.rstrip(b"\0")) + 512 if format == "webdataset" else len(good)  # then zeros
    cuts = [chance.randrange(end) for _ in range(15)]
    for length in [*cuts, min(cuts) // 512 * 512, end - 8, 0]:
        assert not found(good[:length]), length
    if format == "webdataset":
        for place in range(0, end - 512, 512):  # headers, of which some lie between two samples
            if good[place : place + 9].isdigit():
                assert not found(good[:place] + b"x" + good[place + 1 :])
    assert found(good)
    if format == "megatron":
        data.write_bytes(raw[:-2])
        with pytest.raises(RequestError, match=r"tells of .* bytes, and .*train\.bin has"):
            tokens(path, format)
        data.unlink()
        with pytest.raises(RequestError, match=r"has no .*train\.bin beside it"):
            tokens(path, format)


def test_pages_of_parquet_carry_sums(prepared: Prepared, tmp_path: Path) -> None:
    write_as(prepared, "parquet", str(tmp_path / "out"))
    (tmp_path / "out" / "manifest.json").unlink()
    path = tmp_path / "out" / "train-00000.parquet"
    names = pq.read_schema(path).names
    column = pq.read_metadata(path).row_group(0).column(names.index("tokens"))
    good = path.read_bytes()
    middle = column.data_page_offset + column.total_compressed_size // 2
    path.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    with pytest.raises(RequestError, match="cannot be read"):
        tokens(path, "parquet")
    assert tokens(path, "parquet", "skip") == {}


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([[1, -1]]), "holds -1, which is no token id"),
        (pa.array([[1, 1 << 32]]), "holds 4294967296, which is no token id"),
        (pa.array([[0.5]]), "not a row of token ids"),
        (pa.array([[1, None]]), "not as lists of numbers without gaps"),
        (pa.array([None], pa.list_(pa.int64())), "not as lists of numbers without gaps"),
        (pa.array(["1 2"]), "has 'tokens' as string"),
        (pa.array([[]], pa.list_(pa.int64())), "document 1: has no tokens"),
    ],
)
def test_what_is_no_token_ids_is_named(column: pa.Array, said: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": column}), tmp_path / "x.parquet")
    with pytest.raises(RequestError, match=rf"x\.parquet.*{said}"):
        tokens(tmp_path / "x.parquet", "parquet")
    with pytest.raises(RequestError, match=r"no column 'input_ids' \(it has tokens\)"):
        tokens(tmp_path / "x.parquet", "parquet", field="input_ids")


def test_documents_without_ids_are_numbered_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[k] for k in range(10)]
    pq.write_table(pa.table({"tokens": rows}), tmp_path / "x.parquet", row_group_size=3)
    whole = tokens(tmp_path / "x.parquet", "parquet")
    assert whole == {f"x.parquet:{k + 1}": [k] for k in range(10)}
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    assert len(reader(tmp_path, "parquet").parts(BadRecords("fail", pytest.fail))) == 4
    assert tokens(tmp_path / "x.parquet", "parquet") == whole


def test_weights_are_as_many_as_tokens(tmp_path: Path) -> None:
    table = pa.table({"tokens": [[1, 2]], "weights": [[1.0]]})
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(RequestError, match="weights that are not as many as the tokens"):
        tokens(tmp_path / "x.parquet", "parquet")


def test_streams_of_the_datasets_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [[k, k + 1] * (k + 1) for k in range(5)]
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(str(tmp_path / "saved"))
    found = tokens(tmp_path / "saved", "arrow", field="input_ids")
    assert list(found.values()) == rows
    path = next((tmp_path / "saved").glob("*.arrow"))
    assert list(found) == [f"{path.name}:{k}" for k in range(1, 6)]
    path.write_bytes(path.read_bytes()[:-8])  # cut between two messages
    with pytest.raises(RequestError, match="ends too early"):
        tokens(path, "arrow", field="input_ids")


def test_webdatasets_own_library_agrees(prepared: Prepared, tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    write_as(prepared, "webdataset", str(tmp_path / "out"))
    paths = sorted(str(path) for path in (tmp_path / "out").glob("train-*.tar"))
    theirs = {
        sample["json"]["id"]: sample["tokens.npy"].tolist()
        for sample in wds.WebDataset(paths, shardshuffle=False).decode()
    }
    assert theirs == held(prepared)

    rows = [np.arange(k, 3 * k + 1) for k in range(4)]
    for name, write, keys in (
        ("npy", lambda row: row.astype(np.int32), {"field": "npy"}),
        ("json", lambda row: row.tolist(), {"field": "json"}),
        ("bin", lambda row: row.astype("<i8").tobytes(), {"field": "bin", "dtype": "int64"}),
    ):
        path = tmp_path / f"{name}.tar"
        with wds.TarWriter(str(path)) as writer:
            for k, row in enumerate(rows):
                writer.write({"__key__": f"a/b{k}", "cls": 3, name: write(row)})
        found = tokens(path, "webdataset", **keys)
        assert found == {f"a/b{k}": row.tolist() for k, row in enumerate(rows)}
    with pytest.raises(RequestError, match=r"sample a/b0 has 'bin' as plain bytes; set .*`dtype`"):
        tokens(tmp_path / "bin.tar", "webdataset", field="bin")
    with pytest.raises(RequestError, match=r"no member 'tokens' \(it has bin, cls\)"):
        tokens(tmp_path / "bin.tar", "webdataset")


def test_no_member_of_a_tar_is_unpickled(tmp_path: Path) -> None:
    out = io.BytesIO()
    np.save(out, np.array([{}], object), allow_pickle=True)
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        member = tarfile.TarInfo("0.tokens.npy")
        member.size = len(out.getvalue())
        tar.addfile(member, io.BytesIO(out.getvalue()))
    with pytest.raises(RequestError, match=r"sample 0 .*allow_pickle=False"):
        tokens(tmp_path / "x.tar", "webdataset")


def by_hand(
    lengths: list[int], firsts: list[int], code: int = 8, modes: bool = False, version: int = 1
) -> bytes:
    """An `.idx`, from its definition."""
    size = {8: 2, 4: 4, 5: 8, 1: 1, 7: 4}[code]
    starts = [size * sum(lengths[:k]) for k in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(firsts))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(starts)}q", *starts)
    return head + body + struct.pack(f"<{len(firsts)}q", *firsts) + bytes(modes * len(lengths))


def test_megatrons_bytes(tmp_path: Path) -> None:
    values = [[5, 6, 7], [8], [9, 65535]]
    flat = np.array([n for row in values for n in row], np.uint16)
    documents = Documents(["a", "b", "c"], [0, 0, 0], flat, np.array([0, 3, 4, 6]))
    writer = MegatronWriter(tmp_path / "ours", np.uint16)
    writer.add(documents)
    writer.close()
    assert (tmp_path / "ours.idx").read_bytes() == by_hand([3, 1, 2], [0, 1, 2, 3])
    assert (tmp_path / "ours.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 9, 65535)

    path = tmp_path / "x.idx"  # documents of several sequences, in other types, with modes
    for code, letter, modes in ((8, "H", True), (4, "i", False), (5, "q", False)):
        path.write_bytes(by_hand([3, 1, 2], [0, 2, 3], code, modes))
        path.with_suffix(".bin").write_bytes(struct.pack(f"<6{letter}", *flat))
        assert tokens(path, "megatron") == {"x:1": [5, 6, 7, 8], "x:2": [9, 65535]}
    for content, said in (
        (by_hand([3, 3], [0, 1, 2], version=2), "version 2"),
        (by_hand([3, 3], [0, 1, 2], code=7), "type 7"),
        (by_hand([3, 3], [0, 2, 1]), "no order in its documents"),
        (by_hand([3, 3], [0, 1, 9]), "no order in its documents"),
        (by_hand([9, -3], [0, 1, 2]), "negative length"),
        (by_hand([3, 3], [0, 1, 2]).replace(b"MMIDIDX", b"TNTIDX\0"), "no index of Megatron's"),
        (
            by_hand([3, 3, 3], [0, 1, 2, 3]).replace(struct.pack("<q", 6), struct.pack("<q", 8)),
            "do not follow",
        ),
    ):
        path.write_bytes(content)
        path.with_suffix(".bin").write_bytes(bytes(18 if "follow" in said else 12))
        with pytest.raises(RequestError, match=rf"x\.(idx|bin): .*{said}"):
            tokens(path, "megatron")


@pytest.mark.filterwarnings("ignore")  # of what it would rather have installed
def test_megatrons_own_library_agrees(prepared: Prepared, tmp_path: Path) -> None:
    try:
        from megatron.core.datasets.indexed_dataset import (
            IndexedDataset,
            IndexedDatasetBuilder,
        )
    except ImportError:
        need(None, "megatron-core")
    import torch

    write_as(prepared, "megatron", str(tmp_path / "out"))
    theirs = IndexedDataset(str(tmp_path / "out" / "train"))
    assert [row.tolist() for row in theirs] == list(held(prepared).values())
    assert theirs.document_indices.tolist() == list(range(len(theirs) + 1))

    for dtype in (np.uint16, np.int32):
        builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype)
        builder.add_document(torch.arange(7), [4, 3])
        builder.add_document(torch.arange(2), [2])
        builder.finalize(str(tmp_path / "theirs.idx"))
        found = tokens(tmp_path / "theirs", "megatron")
        assert found == {"theirs:1": list(range(7)), "theirs:2": [0, 1]}
