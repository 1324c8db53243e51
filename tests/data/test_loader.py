from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rostra.batch import IGNORE, Batch
from rostra.data.loader import Loader
from rostra.data.samples import Samples
from rostra.data.shards import Shards, open_shard
from rostra.data.writer import ShardWriter
from rostra.store import sha256_file

lengths = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(lambda n: sum(n) > 12)


def write(folder: Path, lengths: list[int], shard_tokens: int) -> Shards:
    """Documents whose tokens count on, so that every token tells its place in the run."""
    writer = ShardWriter(folder, "train", np.uint32, shard_tokens, keep_text=False)
    at = 0
    for number, length in enumerate(lengths):
        writer.add(f"d{number}", "", np.arange(at, at + length, dtype=np.uint32), length)
        at += length
    writer.close()
    hashes = {shard.file: sha256_file(folder / shard.file) for shard in writer.closed}
    return Shards(writer.closed, lambda name: open_shard(folder / name, hashes[name]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


def join(batches: list[Batch]) -> list[torch.Tensor]:
    fields = ("input_ids", "labels", "position_ids")
    return [torch.cat([getattr(batch, name) for batch in batches]) for name in fields]


@settings(max_examples=80, deadline=None)
@given(lengths=lengths, shard_tokens=st.integers(1, 200), length=st.integers(1, 12))
def test_samples_are_slices_of_the_run(
    folder: Path, lengths: list[int], shard_tokens: int, length: int
) -> None:
    """Across shards; each index once an epoch; borders of documents are no targets."""
    shards = write(folder, lengths, shard_tokens)
    samples = Samples(shards, length, seed=5, isolate_documents=True)
    assert len(samples) == (sum(lengths) - 1) // length
    batch = Loader(samples, 4).batch(0, len(samples))
    begins = set(np.cumsum([0, *lengths])[:-1][np.array(lengths) > 0].tolist())
    starts = batch.input_ids[:, 0]
    assert sorted((starts // length).tolist()) == list(range(len(samples)))
    assert torch.equal(batch.input_ids, starts[:, None] + torch.arange(length))
    for row in range(len(batch)):
        position = 0
        for t, token in enumerate(batch.input_ids[row].tolist()):
            position = 0 if token in begins or t == 0 else position + 1
            assert batch.position_ids[row, t] == position
            label = IGNORE if token + 1 in begins else token + 1
            assert batch.labels[row, t] == label


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths,
    seed=st.integers(0, 1 << 65),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_order_does_not_depend_on_batch_sizes(
    folder: Path, lengths: list[int], seed: int, sizes: list[int]
) -> None:
    """Over several epochs: whatever the batches, they join to the same samples."""
    loader = Loader(Samples(write(folder, lengths, 64), 3, seed, True), 8)
    total = 24
    expected = join([loader.batch(0, total)])
    for step in (1, 3, 8):
        batches = [loader.batch(first, step) for first in range(0, total, step)]
        assert all(map(torch.equal, join(batches), expected))
    batches, first = [], 0
    for size in sizes * total:
        batches.append(loader.batch(first, min(size, total - first)))
        if (first := first + size) >= total:
            break
    assert all(map(torch.equal, join(batches), expected))


def test_without_isolation_documents_run_on(folder: Path) -> None:
    samples = Samples(write(folder, [5, 9, 20], 8), 4, seed=0, isolate_documents=False)
    batch = Loader(samples, 4).batch(0, len(samples))
    assert torch.equal(batch.labels, batch.input_ids + 1)
    assert torch.equal(batch.position_ids, torch.arange(4).expand(len(samples), 4))
    assert batch.targets == samples.tokens == len(samples) * 4
    for tensor in (batch.input_ids, batch.labels, batch.position_ids):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        tensor.add_(1)  # its own memory, not the map's


def test_seeds_and_epochs_differ_and_epochs_hold_all(folder: Path) -> None:
    shards = write(folder, [30] * 20, 100)
    samples = Samples(shards, 4, seed=1, isolate_documents=True)
    loader, n = Loader(samples, 8), len(samples)
    epochs = [loader.batch(epoch * n, n).input_ids[:, 0] for epoch in range(3)]
    other = Loader(Samples(shards, 4, 2, True), 8).batch(0, n).input_ids[:, 0]
    orders = [tuple(order.tolist()) for order in (*epochs, other)]
    assert len(set(orders)) == 4
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_locate_names_sample_and_documents(folder: Path) -> None:
    samples = Samples(write(folder, [3, 0, 5, 9, 8], 7), 6, seed=1, isolate_documents=True)
    loader, n = Loader(samples, 2), len(samples)
    assert n == 4
    by_index = [("d0", "d2"), ("d2", "d3"), ("d3", "d4"), ("d4",)]
    for position in range(2 * n):
        place = loader.locate(position)
        assert (place.epoch, place.sample) == divmod(position, n)
        assert tuple(d for d in place.documents if d != "d1") == by_index[place.index]
        assert loader.batch(position, 1).input_ids[0, 0] == place.index * 6


def test_epochs_to_steps(folder: Path) -> None:
    samples = Samples(write(folder, [101], 1000), 4, 0, True)
    loader = Loader(samples, 8)
    assert len(samples) == 25
    assert [loader.steps(epochs) for epochs in (0.01, 1, 2, 0.5)] == [1, 4, 7, 2]
