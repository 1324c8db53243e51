"""Mixtures of sources: shares, limits, changed weights, and the loader that serves them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rostra import Run
from rostra.batch import IGNORE, share_of
from rostra.config.data import DataSection
from rostra.config.loading import LoadTable
from rostra.data import (
    Loader,
    Mixture,
    Packed,
    Prepared,
    Samples,
    Source,
    prepare,
    training_loader,
)
from rostra.data.mixture import BLOCK, shares_of
from rostra.data.shards import Shards, open_shard
from rostra.data.writer import ShardWriter
from rostra.errors import RequestError
from rostra.events import Event, read_events
from rostra.store import sha256_file
from support import tiny_run

weights = st.lists(st.floats(0.001, 100), min_size=1, max_size=6)


def write(folder: Path, lengths: list[int], first: int = 0, examples: bool = False) -> Shards:
    """Documents whose tokens count on from `first`, so that every token tells its place."""
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, "train", np.uint32, 60, keep_text=False)
    at = first
    for number, length in enumerate(lengths):
        tokens = np.arange(at, at + length, dtype=np.uint32)
        ones = np.full(length, 0.5, np.float32) if examples else None
        writer.add(f"{first}:{number}", "", tokens, length, ones)
        at += length
    writer.close()
    hashes = {shard.file: sha256_file(folder / shard.file) for shard in writer.closed}
    return Shards(writer.closed, lambda name: open_shard(folder / name, hashes[name]))


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=200).filter(any))
def test_shares_are_whole_and_close(weights: list[float]) -> None:
    shares = np.array(shares_of(weights))
    exact = np.array(weights) / sum(weights) * BLOCK
    assert shares.sum() == BLOCK
    assert ((shares > 0) == (np.array(weights) > 0)).all()
    tiny = int((exact < 1).sum())  # these were rounded up, at the largest one's cost
    assert np.abs(shares - exact).max() < 1 + tiny


@settings(max_examples=40, deadline=None)
@given(weights=weights, seed=st.integers(0, 1 << 64), prefix=st.integers(0, 3 * BLOCK))
def test_any_prefix_has_its_shares(weights: list[float], seed: int, prefix: int) -> None:
    """To less than 1 + w (K - 2) samples; and exactly after every block."""
    mixture = Mixture(weights, [None] * len(weights), seed)
    shares = np.array(shares_of(weights)) / BLOCK
    bound = 1 + shares * max(0, len(weights) - 2)
    for position in (prefix, prefix + 1, prefix + 17):
        assert (np.abs(mixture.counts(position) - shares * position) < bound).all()
    assert mixture.counts(2 * BLOCK) == tuple((2 * BLOCK * shares).astype(int).tolist())
    sources, numbers = mixture.at(prefix, 100)
    before = np.array(mixture.counts(prefix))
    for source, number in zip(sources.tolist(), numbers.tolist(), strict=True):
        assert before[source] == number
        before[source] += 1
    assert tuple(before.tolist()) == mixture.counts(prefix + 100)


def test_blocks_are_spread_each_in_its_own_way() -> None:
    mixture = Mixture([3, 1, 1], [None] * 3, 5)
    one, two = (mixture.at(block * BLOCK, BLOCK)[0] for block in (0, 1))
    assert not np.array_equal(one, two)
    assert not np.array_equal(one, Mixture([3, 1, 1], [None] * 3, 6).at(0, BLOCK)[0])
    gaps = np.diff(np.flatnonzero(one == 1))
    assert 4 <= gaps.min() <= gaps.max() <= 6


@settings(max_examples=40, deadline=None)
@given(
    terms=st.lists(
        st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(1, 90_000))),
        min_size=1,
        max_size=5,
    ).filter(lambda terms: any(weight for weight, _ in terms)),
    seed=st.integers(0, 1 << 64),
)
def test_limits_are_kept_and_the_others_go_on(terms: list[tuple[int, Any]], seed: int) -> None:
    mixture = Mixture([w for w, _ in terms], [limit for _, limit in terms], seed)
    ends = all(limit is not None for weight, limit in terms if weight)
    assert (mixture.end is not None) == ends
    count = mixture.end if mixture.end is not None else 500_000
    sources, numbers = mixture.at(0, count)
    for source, (weight, limit) in enumerate(terms):
        mine = numbers[sources == source]
        assert mine.tolist() == list(range(len(mine)))  # none twice, none left out
        assert len(mine) <= (limit or count) * (weight > 0)
        assert not ends or len(mine) == (limit if weight else 0)
    assert len(mixture.phases) <= len(terms) + 1
    for phase in mixture.phases[1:]:
        ended = [
            source
            for source, (_, limit) in enumerate(terms)
            if limit is not None and phase.counts[source] == limit
        ]
        assert ended and not any(phase.shares[source] for source in ended)
        after = sources[phase.start : phase.start + 1000]
        if len(after) == 1000 and phase.end is None:
            found = np.bincount(after, minlength=len(terms)) / 1000
            assert np.abs(found - np.array(phase.shares) / BLOCK).max() < 0.01
    if ends:
        assert mixture.counts(count) == tuple(limit if w else 0 for w, limit in terms)
        with pytest.raises(IndexError):
            mixture.at(count, 1)


def test_new_weights_hold_from_the_resumed_position_on() -> None:
    """Nothing is repeated or dropped; the same weights go on as if nothing had been."""
    old = Mixture([1, 1], [None, None], 3)
    state = json.loads(json.dumps(old.state(70_001)))
    assert Mixture([2, 2], [None, None], 3).resume(state, 70_001).start == 0
    new = Mixture([9, 1], [None, None], 3).resume(state, 70_001)
    before, after = old.at(0, 70_001), new.at(70_001, 40_000)
    for source in (0, 1):
        seen = np.concatenate([n[s == source] for s, n in (before, after)])
        assert seen.tolist() == list(range(len(seen)))
    assert np.mean(after[0] == 0) == pytest.approx(0.9, abs=1e-4)
    again = Mixture([9, 1], [None, None], 3).resume(new.state(110_001), 110_001)
    assert again.at(110_001, 99)[0].tolist() == new.at(110_001, 99)[0].tolist()
    limited = Mixture([1, 1], [40_000, None], 3).resume(state, 70_001)
    assert limited.counts(200_000) == (40_000, 160_000)
    assert not np.any(Mixture([1, 1], [10, None], 3).resume(state, 70_001).at(70_001, 99)[0] == 0)


@pytest.fixture(scope="module")
def spaces(tmp_path_factory: pytest.TempPathFactory) -> list[list[Samples | Packed]]:
    """Of each source its variants: documents that run on; whole ones, in two variants of unequal
    length; examples with weights."""
    folder = tmp_path_factory.mktemp("sources")
    load = LoadTable(shuffle="window", window=16)
    whole: dict[str, Any] = {"long_examples": "split", "pad": 7}
    examples = write(folder / "d", [4, 6, 5], 4000, True)
    return [
        [Samples(write(folder / "a", [50, 3, 30, 70], 1000), 16, 1, True)],
        [
            Packed(write(folder / "b", [5, 6, 20, 9, 3] * 3, 2000), 16, 2, load=load, **whole),
            Packed(write(folder / "c", [7, 4, 11, 8] * 3, 3000), 16, 2, **whole),
        ],
        [Packed(examples, 16, 3, packing="none", full_rows=False)],  # 8 wide
    ]


def loader_of(
    spaces: list[list[Samples | Packed]], limits: list[int | None], seed: int, batch: int = 24
) -> Loader:
    sources = [Source(*variants) for variants in spaces]
    return Loader(sources, batch, Mixture([5, 3, 1], limits, seed))


def rows_of(loader: Loader, first: int, count: int) -> list[list[tuple[float, ...]]]:
    """Of each sample its targets: input, label, position and weight."""
    batch = loader.batch(first, count)
    weights = (batch.labels != IGNORE).float() if batch.weights is None else batch.weights
    columns = torch.stack([batch.input_ids, batch.labels, batch.position_ids, weights], dim=2)
    return [[tuple(column) for column in row if column[1] != IGNORE] for row in columns.tolist()]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 64),
    limits=st.tuples(st.none(), *[st.one_of(st.none(), st.integers(1, 40))] * 2),
    switch=st.integers(0, 3),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4, 8])] * 2),
)
def test_the_order_of_samples_is_the_same_for_any_ranks(
    spaces: Any, seed: int, limits: Any, switch: int, sizes: tuple[int, int]
) -> None:
    """Also when their number changes in the middle: each step's samples are what one reads."""
    steps, size = 4, 24
    alone = rows_of(loader_of(spaces, list(limits), seed), 0, steps * size)
    found: list[Any] = []
    for step in range(steps):
        ranks = sizes[step >= switch]
        for rank in range(ranks):
            loader = loader_of(spaces, list(limits), seed)  # as another process has it
            first, count = share_of(size, rank, ranks)
            for more in range(0, count, 5):  # in any micro batches
                at = step * size + first + more
                found += rows_of(loader, at, min(5, count - more))
    assert found == alone


def test_epochs_of_a_source_have_each_sample_once(spaces: Any) -> None:
    """Epoch by epoch, whatever the others do; and variants take turns."""
    loader = loader_of(spaces, [None, None, None], 4)
    places = [loader.locate(position) for position in range(400)]
    for source, variants in enumerate(spaces):
        mine = [place for place in places if place.source == source]
        counts = Counter(place.epoch for place in mine)
        for epoch in range(max(counts)):  # the last one is not over
            samples = variants[epoch % len(variants)]
            indices = [place.index for place in mine if place.epoch == epoch]
            assert sorted(indices) == list(range(len(samples)))
            assert indices != sorted(indices) or len(indices) < 4
        assert [place.epoch for place in mine] == sorted(place.epoch for place in mine)
        assert len(counts) > 1
    two = Source(*spaces[1])
    sizes = [len(samples) for samples in spaces[1]]
    assert sizes[0] != sizes[1]
    assert [two.samples(e) for e in (0, 1, 2, 3)] == [
        0, sizes[0], sum(sizes), sum(sizes) + sizes[0],
    ]  # fmt: skip
    assert two.samples(1.5) == sizes[0] + -(-sizes[1] // 2)
    assert two.epochs(sum(sizes)) == 2


def test_a_mixed_batch_has_one_shape(spaces: Any) -> None:
    """Padding that another source's width brings is seen by nothing, and is no target."""
    loader = loader_of(spaces, [None] * 3, 4)
    batch = loader.batch(0, 24)
    assert batch.input_ids.shape == (24, 16)
    assert batch.weights is not None
    sources = batch.input_ids[:, 0] // 1000
    assert set(sources.tolist()) == {1, 2, 4}
    counted = batch.labels != IGNORE
    narrow = sources == 4
    assert torch.equal(batch.weights, torch.where(narrow[:, None] & counted, 0.5, counted.float()))
    assert not counted[narrow, 8:].any()
    assert torch.equal(batch.position_ids[narrow, 8:], torch.arange(8).expand(int(narrow.sum()), 8))
    for at in range(24):
        alone, width = loader.batch(at, 1), 8 if narrow[at] else 16
        assert torch.equal(alone.input_ids[0], batch.input_ids[at, :width])
        assert torch.equal(alone.labels[0], batch.labels[at, :width])


def test_sources_that_end_are_enough_for_so_many_steps(spaces: Any) -> None:
    sizes = [Source(*variants).samples(2) for variants in spaces]
    loader, total = loader_of(spaces, sizes, 0, batch=10), sum(sizes)  # type: ignore[arg-type]
    assert loader.mixture.end == total
    assert total % 10
    assert loader.steps(2) == loader.steps(9) == total // 10
    assert loader_of(spaces, [None] * 3, 0, batch=10).steps(2) == total // 10 + 1
    loader.check(total // 10)
    with pytest.raises(RequestError, match=rf"enough for {total // 10:,} steps"):
        loader.check(total // 10 + 1)
    endless = loader_of(spaces, [None, 3, None], 0)
    endless.check(10**9)
    with pytest.raises(RequestError, match="Weights may change, but not come or go"):
        endless.resume(None, 24)
    assert Loader(spaces[0][0], 4).state(8) is None


def test_a_run_takes_new_weights_and_goes_on(tmp_path: Path) -> None:
    """Prepared once; what was seen of each source is in events and summary, and adds up."""
    sources = [
        {"type": "text", "path": str(texts(tmp_path / name, name, 12)), "weight": weight}
        for name, weight in (("one", 3), ("two", 1))
    ]
    values = tiny_run(tmp_path, tmp_path / "run", train={"steps": 8}, checkpoint={"every": 4})
    values["data"] |= {"sources": sources, "cache": str(tmp_path / "cache")}

    def crash(event: Event) -> None:
        if event.kind == "step" and event["step"] == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run.open(values).train([crash])
    prepared = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}
    values["data"]["sources"] = [
        {**source, "weight": weight} for source, weight in zip(sources, (0, 1), strict=True)
    ]
    summary = Run.open(values).train()
    assert {path: path.stat().st_mtime_ns for path in prepared} == prepared
    events = read_events(tmp_path / "run" / "events.jsonl")
    steps = [event for event in events if event.kind == "step"]
    seen = {event["step"]: event["source_samples"] for event in steps}
    assert [sum(counts) for counts in seen.values()] == [4 * step for step in seen]
    assert seen[4] == [12, 4]
    assert seen[8] == [12, 20]  # from the checkpoint of step 4 on, only the second
    found = summary["sources"]
    assert [source["samples"] for source in found] == seen[8]
    assert found[1]["epochs"] > found[0]["epochs"] > 0
    del values["data"]["sources"][0]["weight"], values["data"]["sources"][1]["weight"]
    values["train"]["steps"] = 10
    with pytest.raises(RequestError, match="not come or go"):
        Run.open(values).train()


def texts(folder: Path, name: str, count: int) -> Path:
    """A folder of short texts."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"{name} {number}: rain falls on a harbour. " * 9)
    return folder


@pytest.mark.parametrize(
    ("sources", "more", "said"),
    [
        ([{"weight": 1}, {}], {}, r"sources\.1: has no `weight`"),
        ([{"weight": 0}, {"weight": 0}], {}, "every `weight` is 0"),
        ([{"epochs": 2}, {}], {}, "`epochs` needs a `weight`"),
        ([{}], {"chunk_overlap": 8}, "`chunk_overlap` is for `packing: chunk`"),
        ([{}], {"packing": "chunk", "chunk_overlap": 512}, "leaves nothing new in a window"),
        ([{}], {"packing": "none"}, "`packing: none` is for examples"),
        ([{}], {"packing": "best_fit", "isolate_documents": False}, "isolate_documents"),
    ],
)
def test_what_does_not_go_together_is_refused(
    sources: list[dict[str, Any]], more: dict[str, Any], said: str
) -> None:
    listed = [{"type": "text", "path": "x", **source} for source in sources]
    with pytest.raises(ValueError, match=said):
        DataSection.model_validate({"sources": listed, **more})


def test_examples_and_documents_are_mixed(
    corpus: Path, tmp_path: Path, section: Callable[..., DataSection]
) -> None:
    """In batches of one shape; documents that are too long are split, examples left out. What
    is prepared is the same for all weights and ways to fill samples."""
    records = [{"instruction": f"Count to {k}", "output": "one " * (k * 9 + 1)} for k in range(12)]
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(records))
    texts = {"type": "text", "path": str(corpus)}
    keys: set[str] = set()

    def loader_for(*sources: dict[str, Any], **more: Any) -> tuple[Loader, Prepared]:
        data = section(*sources, sequence_length=150, **more)
        prepared = prepare(data, None, lambda _: None)
        keys.add(prepared.key)
        return training_loader(prepared, data, 0, 8, True, 0, lambda _: None), prepared

    for weight in (3, 1):
        both = [{"type": "alpaca", "path": str(path), "weight": 1}, {**texts, "weight": weight}]
        loader, prepared = loader_for(*both)
        batch = loader.batch(0, 24)
        assert batch.labels.shape == (24, 150)
        sources = [loader.locate(position).source for position in range(24)]
        assert abs(sources.count(1) - 24 * weight / (1 + weight)) <= 1
        examples, documents = (source.variants[0] for source in loader.sources)
        assert documents.tokens > prepared.train.of_source(1).tokens > 0  # what is repeated
        assert examples.tokens < prepared.train.of_source(0).tokens
    for packing in ("concatenate", "best_fit", "chunk"):
        loader, prepared = loader_for(texts, packing=packing)
        (samples,) = loader.sources[0].variants
        targets = loader.batch(0, len(samples)).targets
        every = prepared.train.tokens - prepared.train.documents
        assert targets == every or (packing == "concatenate" and every - 150 <= targets < every)
    assert len(keys) == 2
    assert len(list(Path(str(prepared.folder)).glob("rows-*"))) == 2
