from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rostra.batch import Batch
from rostra.config.data import DataSection
from rostra.data import Loader, ReadAhead, open_prepared, prepare, training_loader
from rostra.data.read_ahead import FAR
from rostra.errors import RequestError
from rostra.store import sha256_file
from stores import upload

STEP = 8  # samples of a global batch


@pytest.fixture
def loader(corpus: Path, section: Callable[..., DataSection]) -> Loader:
    data = section({"type": "text", "path": str(corpus)}, prepare={"shard_tokens": 500})
    prepared = prepare(data, None, pytest.fail)
    return training_loader(prepared, data, 3, STEP, True, 0, pytest.fail)


def same(left: Batch, right: Batch) -> bool:
    return all(
        torch.equal(left.tensors()[name], tensor) for name, tensor in right.tensors().items()
    )


def makers() -> list[psutil.Process]:
    """The processes that make batches."""
    mine = psutil.Process().children()
    alive = [child for child in mine if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "rostra.data.read_ahead" in " ".join(child.cmdline())]


def test_a_thread_makes_the_same_batches_beforehand(loader: Loader) -> None:
    asked: list[tuple[int, int]] = []
    make = loader.batch

    def noted(first: int, count: int) -> Batch:
        asked.append((first, count))
        return make(first, count)

    loader.batch = noted  # type: ignore[method-assign]
    ahead = ReadAhead(loader, 2)
    assert same(ahead.batch(3, 4), make(3, 4))
    ends = time.monotonic() + 10
    while len(asked) < 3 and time.monotonic() < ends:
        time.sleep(0.01)
    assert sorted(asked) == [(3, 4), (3 + STEP, 4), (3 + 2 * STEP, 4)]
    chance = random.Random(1)
    for first in [11, 19, 27, *(chance.randrange(200) for _ in range(20))]:
        assert same(ahead.batch(first, 4), make(first, 4))
    assert len(asked) == len(set(asked)) or asked.count((11, 4)) == 1  # none of those made twice
    assert (ahead.global_batch_size, ahead.steps(2)) == (STEP, loader.steps(2))
    assert (ahead.sample_tokens, ahead.locate(5)) == (loader.sample_tokens, loader.locate(5))
    ahead.close()
    assert same(ahead.batch(0, 8), make(0, 8))


def test_processes_that_die_change_nothing_and_none_is_left(loader: Loader) -> None:
    """One killed, all told to stop, asked in any order; then gone, without being closed."""
    heard: list[str] = []
    ahead = ReadAhead(loader, 1, workers=2, notice=heard.append)
    first, second = makers()
    for step in range(8):
        assert same(ahead.batch(step * STEP, STEP), loader.batch(step * STEP, STEP))
        for process in makers():
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
        if step == 2:
            first.kill()
    assert heard == [f"the loader's process {first.pid} died; another takes its place"]
    assert second in makers()
    assert len(makers()) == 2
    for place in (5, 100, 13, 40):  # unforeseen, too
        assert same(ahead.batch(place, 3), loader.batch(place, 3))
    del ahead  # as when training raises
    assert makers() == []


def test_shards_far_ahead_are_fetched_beforehand(
    corpus: Path, section: Callable[..., DataSection], tmp_path: Path
) -> None:
    load = {"shuffle": "none", "cache": str(tmp_path / "near")}
    source = {"type": "text", "path": str(corpus)}
    data = section(source, prepare={"shard_tokens": 500}, load=load)
    prepared = prepare(data, None, pytest.fail)
    upload(Path(prepared.folder), f"memory://{tmp_path}")
    far = open_prepared(f"memory://{tmp_path}", data.load)
    assert far is not None
    ahead = ReadAhead(training_loader(far, data, 3, 1, True, 0, pytest.fail), 2)
    ahead.batch(0, 1)
    expected = {0, int(np.searchsorted(far.train.starts, FAR * data.sequence_length, "right")) - 1}
    assert 0 < max(expected) < len(far.train)
    hashes = [sha256_file(Path(prepared.folder, name)) for name in far.train.files]
    ends = time.monotonic() + 10
    fetched: set[int] = set()
    while fetched != expected and time.monotonic() < ends:
        here = {path.name for path in (tmp_path / "near").glob("[!.]*")}
        fetched = {index for index, sha256 in enumerate(hashes) if sha256 in here}
        time.sleep(0.01)
    ahead.close()
    assert fetched == expected


TRAINER = """
import pickle, sys, time
from rostra.data import ReadAhead
ahead = ReadAhead(pickle.load(open(sys.argv[1], "rb")), 2, workers=1)
ahead.batch(0, 4)
ahead.batch(8, 4)
print(ahead._maker._workers[0]._process.pid, flush=True)
time.sleep(600)
"""


def test_no_process_outlives_a_killed_trainer(loader: Loader, tmp_path: Path) -> None:
    (tmp_path / "loader").write_bytes(pickle.dumps(loader))
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "loader")]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    maker = psutil.Process(int(trainer.stdout.readline()))
    trainer.kill()
    trainer.communicate()
    maker.wait(20)


def test_what_goes_wrong_in_a_process_is_raised_when_its_batch_is_asked_for(
    loader: Loader, tmp_path: Path
) -> None:
    ahead = ReadAhead(loader, 2, workers=1)
    for path in (tmp_path / "cache").rglob("train-*"):
        os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(RequestError, match=r"train-0[\d-]+\.arrow: this file cannot be used"):
        for step in range(4):
            ahead.batch(step * STEP, 4)
    ahead.close()
    assert makers() == []
