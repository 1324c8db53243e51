from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rostra import RequestError, Run
from rostra.checkpoint import newest_checkpoint, open_checkpoint
from rostra.store import RunFolder

Tiny = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tiny: Tiny) -> RunFolder:
    run = Run.open(tiny(checkpoint={"every": 2, "keep": 2}))
    run.train()
    return RunFolder(run.path)


def test_only_the_newest_are_kept(folder: RunFolder) -> None:
    assert folder.steps() == [4, 6]


def test_a_checkpoint_holds_all_there_is(folder: RunFolder) -> None:
    found = open_checkpoint(folder.checkpoint(6))
    assert found.position.step == 6
    assert found.position.samples == 24
    assert found.layout.micro_batch == 4
    assert found.config["model"]["preset"] == "tiny"
    assert found.values["steps"] == 6
    kinds = {name.split("/")[0] for name in found.tensors()}
    assert kinds == {"model", "optimizer", "random"}


def test_any_changed_byte_is_found(folder: RunFolder, tmp_path: Path) -> None:
    chance = random.Random(0)
    files = ["state.safetensors", "state.json"]
    for number in range(100):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(folder.checkpoint(6), copy)
        path = copy / chance.choice(files)
        content = bytearray(path.read_bytes())
        if chance.random() < 0.3:
            content = content[: chance.randrange(len(content))]
        else:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        with pytest.raises(RequestError, match="damaged"):
            open_checkpoint(copy)
        shutil.rmtree(copy)


def test_without_its_manifest_it_does_not_count(folder: RunFolder) -> None:
    (folder.checkpoint(6) / "manifest.json").unlink()
    found, problems = newest_checkpoint(folder)
    assert found is not None
    assert found.position.step == 4
    assert problems == []
    with pytest.raises(RequestError, match="no manifest"):
        open_checkpoint(folder.checkpoint(6))


def test_another_format_is_named(folder: RunFolder) -> None:
    path = folder.checkpoint(6) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(RequestError, match="format 99"):
        open_checkpoint(folder.checkpoint(6))


def test_no_pickle_is_written(folder: RunFolder) -> None:
    for path in folder.checkpoint(6).iterdir():
        assert path.suffix in (".safetensors", ".json")


def test_the_random_state_comes_back(folder: RunFolder) -> None:
    tensors = open_checkpoint(folder.checkpoint(6)).tensors()
    torch.set_rng_state(tensors["random/cpu"])
    first = torch.rand(3)
    torch.set_rng_state(tensors["random/cpu"])
    assert torch.equal(first, torch.rand(3))
