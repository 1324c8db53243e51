from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rostra.config.data import DataSection
from rostra.data import Prepared, held_out, open_prepared, prepare
from rostra.data.shards import open_shard
from rostra.data.writer import ShardWriter
from rostra.errors import RequestError
from rostra.store import sha256_file


@pytest.fixture
def prepared(corpus: Path, section: Callable[..., DataSection]) -> Prepared:
    source = {"type": "text", "path": str(corpus)}
    return prepare(section(source, prepare={"shard_tokens": 500}), None, pytest.fail)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_shard_gives_back_what_was_written(tmp_path: Path, dtype: type) -> None:
    documents = [np.arange(n, dtype=dtype) + n for n in (3, 0, 5, 1)]
    writer = ShardWriter(tmp_path, "train", dtype, shard_tokens=8, keep_text=False)
    for number, tokens in enumerate(documents):
        writer.add(f"d{number}", "", tokens, 10 * number)
    writer.close()
    assert [shard.file for shard in writer.closed] == ["train-00000.arrow", "train-00001.arrow"]
    first = open_shard(tmp_path / "train-00000.arrow", sha256_file(tmp_path / "train-00000.arrow"))
    assert first.tokens.dtype == dtype
    assert first.tokens.tolist() == np.concatenate(documents[:3]).tolist()
    assert first.offsets.tolist() == [0, 3, 3, 8]
    assert [first.id(row) for row in range(3)] == ["d0", "d1", "d2"]
    assert first.batch.column("bytes").to_pylist() == [0, 10, 20]
    assert not first.tokens.flags.owndata
    assert not first.tokens.flags.writeable  # in the memory map


def test_shards_are_plain_arrow_files(prepared: Prepared) -> None:
    for path in sorted(prepared.folder.glob("*.arrow")):
        table = pa.ipc.open_file(path.read_bytes())
        assert table.num_record_batches == 1
        types = {field.name: field.type for field in table.schema}
        assert types["tokens"].value_type == pa.uint16()
        assert ("text" in types) == path.name.startswith("held_out")


def test_shards_close_when_full_and_counts_are_right(prepared: Prepared) -> None:
    assert len(prepared.train) > 2
    for index, counts in enumerate(prepared.train.counts):
        shard = prepared.train[index]
        assert (counts.tokens, counts.documents) == (len(shard.tokens), len(shard.offsets) - 1)
        assert counts.tokens >= 500 or index == len(prepared.train) - 1
        assert counts.tokens - len(shard.tokens[shard.offsets[-2] :]) < 500
    said = prepared.manifest["counts"]["train"]
    assert said == {
        "documents": prepared.train.documents,
        "tokens": prepared.train.tokens,
        "bytes": prepared.train.bytes,
    }
    assert prepared.train.starts[-1] == prepared.train.tokens


def use_all(prepared: Prepared) -> None:
    """Open everything anew and use it."""
    fresh = open_prepared(prepared.folder)
    if fresh is None:
        raise RequestError("not whole")
    for index in range(len(fresh.train)):
        fresh.train[index].tokens.sum()
    list(held_out(fresh))
    fresh.tokenizer  # noqa: B018


@pytest.mark.parametrize("damage", ["cut", "emptied", "missing", "flipped"])
def test_a_bad_shard_is_named_and_made_anew_once_deleted(
    prepared: Prepared, corpus: Path, section: Callable[..., DataSection], damage: str
) -> None:
    path = prepared.folder / "train-00000-00001.arrow"
    good = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(good[:-8])
        case "emptied":
            path.write_bytes(b"")
        case "missing":
            path.unlink()
        case "flipped":
            path.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    with pytest.raises(RequestError, match=r"train-00000-00001\.arrow: this file .* Delete it"):
        prepared.train[1]  # opened now: its counts were read before
    path.unlink(missing_ok=True)
    source = {"type": "text", "path": str(corpus)}
    heard: list[str] = []
    again = prepare(section(source, prepare={"shard_tokens": 500}), None, heard.append)
    assert "preparing it anew" in heard[0]
    assert again.folder == prepared.folder
    assert path.read_bytes() == good  # and byte for byte the same
    use_all(again)
