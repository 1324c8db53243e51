"""Streams of raw sources: every document once an epoch, the same samples for any ranks, and a
checkpoint's cursors from which it goes on."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rostra.batch import IGNORE, Batch, share_of
from rostra.config.data import DataSection
from rostra.data import (
    Encoder,
    ReadAhead,
    StreamLoader,
    held_out,
    prepare,
    streaming_loader,
    streams,
    train_tokenizer,
)
from rostra.data.documents import Losses
from rostra.data.readers import jsonl
from rostra.data.reading import make_reader
from rostra.data.sources import BadRecords
from rostra.data.streaming import Turns, open_streams
from rostra.data.streams import Stream
from rostra.errors import RequestError
from rostra.files import File, open_range

ENCODER = Encoder(train_tokenizer(iter(["one two three four five six"]), 280))
LENGTH = 8

Section = Callable[..., DataSection]


def words(number: int, count: int) -> str:
    return f"doc{number} " + " ".join(f"w{k}" for k in range(count))


def jsonl_of(folder: Path, sizes: list[list[int]]) -> dict[str, Any]:
    """A source of files with documents of so many words."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    number = 0
    for index, documents in enumerate(sizes):
        with (folder / f"{index:03}.jsonl").open("w") as file:
            for count in documents:
                file.write(json.dumps({"text": words(number, count)}) + "\n")
                number += 1
    return {"type": "jsonl", "path": str(folder)}


def data_of(*sources: dict[str, Any], **keys: Any) -> DataSection:
    values = {"sequence_length": LENGTH, "held_out": 0.0, "streaming": True, **keys}
    return DataSection.model_validate({"sources": list(sources), **values})


def loader_of(data: DataSection, lanes: int, notice: Callable[[str], None] = pytest.fail) -> Any:
    losses = Losses.of(data)
    losses.bad.notice = notice
    streams = open_streams(data, 5, lanes, losses.bad, ENCODER.hash)
    return StreamLoader(streams, data, ENCODER, 5, lanes, notice, losses)


def same(left: Batch, right: Batch) -> bool:
    pairs = zip(left.tensors().values(), right.tensors().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def step_of(loaders: list[StreamLoader], step: int, lanes: int) -> torch.Tensor:
    """The inputs of a step by as many ranks as there are loaders."""
    shares = (share_of(lanes, rank, len(loaders)) for rank in range(len(loaders)))
    asked = zip(loaders, shares, strict=True)
    rows = [loader.batch(step * lanes + first, n).input_ids for loader, (first, n) in asked if n]
    return torch.cat(rows)


def cursors_of(loaders: list[StreamLoader], position: int) -> Any:
    """As a checkpoint has them, from all ranks."""
    found: dict[int, Any] = {}
    for loader in loaders:
        found |= loader.cursors(position)
    return json.loads(json.dumps([found[lane] for lane in sorted(found)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stream")


files = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=25)
@given(
    sizes=files,
    lanes=st.integers(1, 9),
    before=st.integers(0, 5),
    ranks=st.sampled_from([(1, 2), (2, 1), (3, 8), (8, 3), (4, 2)]),
)
def test_any_ranks_make_the_same_samples_also_when_they_change(
    folder: Path, sizes: list[list[int]], lanes: int, before: int, ranks: tuple[int, int]
) -> None:
    data = data_of(jsonl_of(folder / "ranks", sizes))
    steps = 8
    alone = loader_of(data, lanes)
    expected = [alone.batch(step * lanes, lanes) for step in range(steps)]
    assert same(loader_of(data, lanes).batch(0, steps * lanes), joined(expected))
    first = [loader_of(data, lanes) for _ in range(ranks[0])]
    made = [step_of(first, step, lanes) for step in range(before)]
    then = [loader_of(data, lanes) for _ in range(ranks[1])]
    if before:
        if lanes > 1:  # one rank is further already, as a thread reads ahead
            step_of(first[:1], before, lanes)
        saved = cursors_of(first, before * lanes)
        for loader in then:
            loader.resume(None, saved, before * lanes)
    made += [step_of(then, step, lanes) for step in range(before, steps)]
    assert torch.equal(torch.cat(made), torch.cat([batch.input_ids for batch in expected]))


def test_looking_back_moves_no_cursor(folder: Path) -> None:
    """At a position before, or in a lane of another rank; then a checkpoint."""
    data = data_of(jsonl_of(folder / "back", [[9, 30, 4], [7, 2, 60]]))
    plain, looking = loader_of(data, 2), loader_of(data, 2)
    for loader in (plain, looking):
        for step in range(3):
            loader.batch(2 * step, 2)
    looking.locate(1)
    assert cursors_of([looking], 6) == cursors_of([plain], 6)
    of_one_rank = loader_of(data, 2)
    for step in range(3):
        of_one_rank.batch(2 * step, 1)
    of_one_rank.locate(3)
    assert cursors_of([of_one_rank], 6) == cursors_of([plain], 6)


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(torch.cat([b.tensors()[n] for b in batches]) for n in batches[0].tensors()))


@settings(max_examples=30)
@given(sizes=files, lanes=st.integers(1, 9), long=st.booleans())
def test_each_document_is_in_one_lane_once_an_epoch(
    folder: Path, sizes: list[list[int]], lanes: int, long: bool
) -> None:
    """And what a lane's samples are is its documents, run on and cut: labels one further."""
    data = data_of(jsonl_of(folder / "once", sizes))
    (stream,) = open_streams(data, 5, lanes, BadRecords("fail", pytest.fail))
    assert stream.size >= 4 * lanes
    count = sum(map(len, sizes))
    for epoch in range(2):
        found = texts_of(stream, epoch)
        assert sorted(int(text.split()[0][3:]) for text in found) == list(range(count))
    loader, steps = loader_of(data, lanes), 12 if long else 3
    batch = loader.batch(0, steps * lanes)
    for lane in range(lanes):
        rows = [row * lanes + lane for row in range(steps)]
        tokens, begins = run_of(stream, lane, steps * LENGTH + 1)
        inputs, labels = (t[rows].flatten().numpy() for t in (batch.input_ids, batch.labels))
        assert (inputs == tokens[:-1]).all()
        assert (labels == np.where(begins[1:], IGNORE, tokens[1:])).all()
        positions = batch.position_ids[rows].flatten().numpy()
        starts = begins[:-1] | (np.arange(steps * LENGTH) % LENGTH == 0)
        assert (positions == np.arange(len(starts)) - last_true(starts)).all()


def texts_of(stream: Stream, epoch: int) -> list[str]:
    bad = BadRecords("fail", pytest.fail)
    stripes = (stream.stripe(e) for e in range(epoch * stream.size, (epoch + 1) * stream.size))
    found = ((stripe, item) for stripe in stripes for _, item in stripe.documents(0, bad))
    return [text for stripe, item in found if (text := stripe.share(item.text))]


def run_of(stream: Stream, lane: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A lane's tokens from the beginning, and where documents begin."""
    tokens: list[int] = []
    begins: list[bool] = []
    element = lane
    while len(tokens) < length:
        stripe = stream.stripe(element)
        for _, item in stripe.documents(0, BadRecords("fail", pytest.fail)):
            (ids,) = ENCODER.encode([stripe.share(item.text)])
            tokens += ids.tolist()
            begins += [place == 0 for place in range(len(ids))]
        element += stream.lanes
    return np.array(tokens[:length]), np.array(begins[:length])


def last_true(flags: np.ndarray) -> np.ndarray:
    return np.maximum.accumulate(np.where(flags, np.arange(len(flags)), 0))


def test_a_position_may_be_asked_for_again_and_out_of_order(folder: Path) -> None:
    data = data_of(jsonl_of(folder / "order", [[30, 2, 9], [15] * 7]))
    lanes = 3
    expected = loader_of(data, lanes).batch(0, 300)
    loader = loader_of(data, lanes)
    for first, count in [(60, 3), (9, 3), (9, 3), (200, 40), (0, 1), (7, 2), (13, 30), (201, 2)]:
        assert same(loader.batch(first, count), expected.rows(first, first + count))
    for step in range(300):  # cursors from long before are let go
        loader.batch(step * lanes, lanes)
        assert loader.state((step + 1) * lanes) is None
    assert all(len(lane.kept) < 150 for lane in loader._lanes.values())
    assert same(loader.batch(0, 3), expected.rows(0, 3))
    place = loader.locate(10)
    assert place.source == 0
    assert place.documents
    ahead = ReadAhead(loader_of(data, lanes), 2)
    for step in [0, 1, 2, 3, 1, 2, 9, 10]:
        made = ahead.batch(step * lanes + 1, 2)
        assert same(made, expected.rows(step * lanes + 1, step * lanes + 3))
    ahead.close()


def test_going_on_reads_only_what_it_must(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a large file: a range for each lane, and the document that was cut."""
    data = data_of(jsonl_of(folder / "large", [[25] * 4_000]), sequence_length=64)
    size = (folder / "large" / "000.jsonl").stat().st_size
    read = Counter[str]()

    def counted(file: File, start: int = 0, stop: int | None = None) -> BinaryIO:
        source = open_range(file, start, stop)
        readline = source.readline
        return Counting(source, lambda: count(readline()))  # type: ignore[return-value]

    def count(line: bytes) -> bytes:
        read["bytes"] += len(line)
        return line

    monkeypatch.setattr(jsonl, "open_range", counted)
    monkeypatch.setattr(streams, "READ_BYTES", 4096)
    lanes, steps = 2, 2000
    loader = loader_of(data, lanes)
    for step in range(steps):
        loader.batch(step * lanes, lanes)
    assert read["bytes"] > size / 2
    saved = cursors_of([loader], steps * lanes)
    read.clear()
    again = loader_of(data, lanes)
    again.resume(None, saved, steps * lanes)
    batch = again.batch(steps * lanes, lanes)
    assert 0 < read["bytes"] < size / 5
    assert same(batch, loader.batch(steps * lanes, lanes))


class Counting:
    def __init__(self, source: BinaryIO, readline: Callable[[], bytes]) -> None:
        self.source, self.readline = source, readline

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()


def test_every_source_streams_the_documents_that_it_has(tmp_path: Path) -> None:
    texts = [words(number, 3 + number) for number in range(9)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(" ".join(texts[:6]))
    (tmp_path / "text" / "b.txt").write_text(texts[7])
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=4)
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(texts) + "\n")
    tokens = pa.array([ids.tolist() for ids in ENCODER.encode(texts)], pa.large_list(pa.uint32()))
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "tokens.parquet")
    kinds: dict[str, dict[str, Any]] = {
        "parquet": {"path": str(tmp_path / "a.parquet")},
        "csv": {"path": str(tmp_path / "a.csv")},
        "tokens": {"path": str(tmp_path / "tokens.parquet"), "format": "parquet"},
        "gutenberg": {"path": str(tmp_path / "text" / "b.txt")},
        "text": {"path": str(tmp_path / "text")},
    }
    bad = BadRecords("fail", pytest.fail)
    for kind, keys in kinds.items():
        data = data_of({"type": kind, **keys})
        (stream,) = open_streams(data, 5, 3, bad, ENCODER.hash)
        items = Counter(stripe_text(stream, element, bad) for element in range(stream.size))
        once = "".join(sorted("".join(items.elements()).replace(" ", "")))
        assert max(n for text, n in items.items() if text) == 1
        reader = make_reader(data.sources[0], 0)
        batches = [b for part in reader.parts(bad) for b in reader.read(part, bad)]
        column = "tokens" if kind == "tokens" else "text"
        whole = "".join(str(value) for b in batches for value in b.column(column).to_pylist())
        assert once == "".join(sorted(whole.replace(" ", ""))), kind
        loader_of(data, 3).batch(0, 6)
    (stream,) = open_streams(data, 5, 3, bad)
    assert sum(map(bool, texts_of(stream, 0))) >= 6  # a file is cut, so that lanes differ
    rows = loader_of(data, 3).batch(0, 3).input_ids
    assert len({tuple(row.tolist()) for row in rows}) == 3


def stripe_text(stream: Stream, element: int, bad: BadRecords) -> str:
    stripe = stream.stripe(element)
    found = [item for _, item in stripe.documents(0, bad)]
    return "".join(
        stripe.share(item.text) if item.tokens is None else str(item.tokens.tolist())
        for item in found
    )


def test_weights_are_kept_to_and_may_change(folder: Path) -> None:
    turns = Turns([3, 1, 0], 4, 7)
    picked = np.array([turns.at(sample) for sample in range(2000)])
    running = np.cumsum(picked == 1, axis=0) - 0.25 * np.arange(1, 2001)[:, None]
    assert np.abs(running).max() < 4
    assert not (picked == 2).any()
    assert all(turns.one(n, lane) == picked[n, lane] for n in range(50) for lane in range(4))
    sources = [
        {**jsonl_of(folder / f"w{k}", [[20 + k] * 30]), "name": name, "weight": weight}
        for k, (name, weight) in enumerate([("a", 3), ("b", 1)])
    ]
    lanes, steps = 4, 40
    first = loader_of(data_of(*sources), lanes)
    batches = [first.batch(step * lanes, lanes) for step in range(steps)]
    state = first.state(steps * lanes)
    longest = ENCODER.encode(["w20"])[0][-3:].tolist()  # only b's documents have this word
    assert longest
    assert state is not None
    assert sum(state["seen"]) == steps * lanes
    assert state["seen"][1] == pytest.approx(steps * lanes / 4, abs=2 * lanes)
    saved = cursors_of([first], 20 * lanes)
    before = loader_of(data_of(*sources), lanes).state(20 * lanes)
    again = loader_of(data_of(*sources), lanes)
    again.resume(before, saved, 20 * lanes)
    assert all(same(again.batch(n * lanes, lanes), batches[n]) for n in range(20, steps))
    assert again.state(steps * lanes) == state
    changed = loader_of(data_of({**sources[0], "weight": 0}, sources[1]), lanes)
    changed.resume(before, saved, 20 * lanes)
    changed.batch(20 * lanes, 10 * lanes)
    assert changed.state(30 * lanes) == {
        "seen": [before["seen"][0], before["seen"][1] + 10 * lanes]
    }
    with pytest.raises(RequestError, match="`weight` for every source"):
        changed.resume(None, saved, 80)


def test_what_cannot_be_trained_on_is_refused_or_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("no json\n" + json.dumps({"text": words(1, 50)}) + "\n")
    source = {"type": "jsonl", "path": str(path)}
    failing = loader_of(data_of(source), 1)
    for _ in range(2):  # it is said again, not passed over
        with pytest.raises(RequestError, match=r"a\.jsonl, .*not JSON"):
            failing.batch(0, 4)
    said: list[str] = []
    skipping = loader_of(data_of(source, on_bad_record="skip"), 1, said.append)
    skipping.batch(0, 4)
    skipping.state(4)
    assert any("not JSON" in words for words in said)
    clean = {"length": {"min_characters": 10_000}}
    with pytest.raises(RequestError, match="nothing is left to train on"):
        loader_of(data_of(source, on_bad_record="skip", clean=clean), 1, said.append).batch(0, 1)
    pq.write_table(pa.table({"tokens": [[1, 2, 70_000]]}), tmp_path / "t.parquet")
    tokens = {"type": "tokens", "path": str(tmp_path / "t.parquet"), "format": "parquet"}
    with pytest.raises(RequestError, match="holds token 70000"):
        loader_of(data_of(tokens), 1).batch(0, 1)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"duplicates": {"find": "exact"}}, "cannot find duplicates"),
        ({"packing": "best_fit"}, "packing: concatenate"),
        ({"load": {"workers": 1}}, "load.workers: 0"),
        ({"load": {"shuffle": "window"}}, "load.shuffle"),
        ({"sources": [{"type": "text", "path": "x", "weight": 1, "epochs": 2}]}, "`epochs`"),
        ({"sources": [{"type": "completion", "path": "x"}]}, "no place for examples"),
    ],
)
def test_what_does_not_stream_is_refused(keys: dict[str, Any], said: str) -> None:
    values = {"sources": [{"type": "text", "path": "x"}], "streaming": True, **keys}
    with pytest.raises(ValueError, match=said):
        DataSection.model_validate(values)


def test_a_head_is_prepared_for_tokenizer_and_evaluation(
    section: Section, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded part of the sources; what it holds out is not trained on."""
    source = jsonl_of(folder / "head", [[20] * 200] * 5)
    data = section(source, streaming=True, held_out=0.3)
    monkeypatch.setattr("rostra.data.head.TRAINED_BYTES", 30_000)
    prepared = prepare(data, None, pytest.fail)
    counts = prepared.manifest["counts"]
    assert 25_000 < sum(found["bytes"] for found in counts.values()) < 60_000
    loader = streaming_loader(prepared, data, 1, 4, pytest.fail)
    trained = named(" ".join(map(prepared.tokenizer.decode, loader.batch(0, 2500).input_ids)))
    held = named(" ".join(document.text for document in held_out(prepared)))
    assert len(held) > 50
    assert len(trained) > 600
    assert not held & trained
    assert prepare(data, None, pytest.fail).identity == prepared.identity
    (folder / "head" / "more.jsonl").write_text(json.dumps({"text": words(1, 5)}) + "\n")
    assert prepare(data, None, pytest.fail).key != prepared.key


def named(text: str) -> set[str]:
    """The documents whose names stand in it, whole."""
    return set(re.findall(r"(doc\d+) w0", text))


def test_lanes_that_wait_leave_connections_to_the_others(s3: str) -> None:
    """Each has a large compressed file open, and there are more of them than a pool has."""
    lines = (json.dumps({"text": os.urandom(8000).hex()}) for _ in range(800))
    packed = gzip.compress("\n".join(lines).encode(), 1)
    assert len(packed) > 6 << 20
    store = fsspec.filesystem("s3")
    for number in range(13):
        store.pipe_file(f"{s3[5:]}/{number}.jsonl.gz", packed)
    loader = loader_of(data_of({"type": "jsonl", "path": s3}), 13)
    made: list[Batch] = []
    thread = threading.Thread(target=lambda: made.append(loader.batch(0, 13)), daemon=True)
    thread.start()
    thread.join(60)
    assert made
