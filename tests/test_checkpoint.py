from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranks import Ranks
from rostra import RequestError
from rostra.checkpoint import (
    Checkpoint,
    Position,
    keep_newest,
    newest_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from rostra.errors import TrainingFailed
from rostra.layout import Layout
from rostra.pieces import Piece, Reader, fill, local_piece
from rostra.store import RunFolder, commit_folder, write_json
from rostra.workers import on_every_rank

LAYOUT = Layout(micro_batch=4, accumulation=1)
CONFIG = {"model": {"preset": "tiny"}, "run": {"seed": 3}}
WHOLE = {
    "model/a": torch.arange(35.0).reshape(5, 7),
    "optimizer/a/exp_avg": torch.arange(35.0).reshape(5, 7) / 10,
    "optimizer/a/step": torch.tensor(4.0),
    "master/a": torch.arange(35.0).reshape(5, 7) + 0.5,
    "model/b": torch.arange(6.0).bfloat16(),
}


class Held:
    """An engine that only holds: weights by row over the ranks, masters as flat stretches."""

    def __init__(self, scale: float = 1.0) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {"steps": 6}
        for name, whole in WHOLE.items():
            value = whole * scale
            if dist.is_initialized() and name in ("model/a", "optimizer/a/exp_avg"):
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                value = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
            elif dist.is_initialized() and name == "model/b":
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                value = distribute_tensor(value, mesh, [Replicate()], src_data_rank=None)
            self.tensors[name] = value

    def flat(self) -> tuple[int, int]:
        """This rank's stretch of the masters."""
        if not dist.is_initialized():
            return 0, 35
        step = -(-35 // dist.get_world_size())
        return step * dist.get_rank(), min(35, step * (dist.get_rank() + 1))

    def state(self) -> tuple[Iterable[dict[str, Piece]], dict[str, Any]]:
        first = not dist.is_initialized() or dist.get_rank() == 0
        found = {
            name: local_piece(tensor)
            for name, tensor in self.tensors.items()
            if first or (isinstance(tensor, DTensor) and tensor.placements[0].is_shard())
        }
        start, stop = self.flat()
        stretch = self.tensors["master/a"].flatten()[start:stop]
        return [found | {"master/a": Piece(stretch, (5, 7), (start,))}], self.values

    def load_state(self, reader: Reader, values: dict[str, Any]) -> None:
        for name, tensor in self.tensors.items():
            fill(tensor, reader, name)
        self.values = values

    def check(self) -> None:
        for name, tensor in self.tensors.items():
            piece = local_piece(tensor)
            at = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.data.shape, strict=True))
            assert torch.equal(piece.data, WHOLE[name][at]), name


def save(folder: str | Path, step: int = 6, engine: Held | None = None) -> Path:
    position = Position(step, samples=4 * step, tokens=124 * step)
    return save_checkpoint(
        RunFolder(Path(folder)), engine or Held(), position, LAYOUT, CONFIG, {"tokenizer": "t"}
    )


def check_loads(folder: str) -> Checkpoint:
    found, problems = newest_checkpoint(RunFolder(Path(folder)))
    assert found is not None
    assert problems == []
    engine = Held(scale=0.0)
    found.restore(engine)
    engine.check()
    assert engine.values == {"steps": 6}
    return found


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    for step in (2, 4, 6):
        save(tmp_path, step)
    return RunFolder(tmp_path)


def test_only_the_newest_are_kept(folder: RunFolder) -> None:
    keep_newest(folder, 2)
    assert folder.steps() == [4, 6]


def test_a_checkpoint_holds_all_there_is(folder: RunFolder) -> None:
    found = check_loads(str(folder.path))
    assert found.position == Position(6, 24, 744)
    assert found.layout == LAYOUT
    assert found.config == CONFIG
    assert found.data == {"tokenizer": "t"}
    assert set(found.reader().names()) == {*WHOLE, "random/0/cpu"}


def test_any_changed_byte_is_found(folder: RunFolder, tmp_path: Path) -> None:
    chance = random.Random(0)
    files = ["part-0.safetensors", "state.json", "pieces.json"]
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


class OneBuffer(Held):
    """Its tensors lie elsewhere, and come through a buffer that each makes its own."""

    def state(self) -> tuple[Iterable[dict[str, Piece]], dict[str, Any]]:
        return self.read_in(), self.values

    def read_in(self) -> Iterator[dict[str, Piece]]:
        for name, tensor in self.tensors.items():
            buffer = tensor.clone()
            yield {name: local_piece(buffer)}
            buffer.zero_()


def test_a_state_in_groups_is_written_group_by_group(tmp_path: Path) -> None:
    path = save(tmp_path, engine=OneBuffer())
    assert check_loads(str(tmp_path)).ranks == 1
    assert len(list(path.glob("part-0*.safetensors"))) == len(WHOLE)


SAVE_MUCH = """
import sys, torch
from pathlib import Path
from rostra.checkpoint import Position, save_checkpoint
from rostra.layout import Layout
from rostra.memory import peak_resident_bytes
from rostra.pieces import Piece
from rostra.store import RunFolder

class Much:
    tensors = [torch.ones(300, 62_500).t() for _ in range(4)]  # no file holds it as it lies

    def state(self):
        shape = tuple(self.tensors[0].shape)
        return [{f"model/{i}": Piece(x, shape, (0, 0)) for i, x in enumerate(self.tensors)}], {}

before = peak_resident_bytes()
save_checkpoint(RunFolder(Path(sys.argv[1])), Much(), Position(1, 1, 1), Layout(1, 1), {}, {})
print(sum(x.nbytes for x in Much.tensors), peak_resident_bytes() - before)
"""


def test_saving_takes_little_memory(tmp_path: Path) -> None:
    """Beside the state, also where all of it has to be copied on its way."""
    command = [sys.executable, "-c", SAVE_MUCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    state, more = map(int, done.stdout.split())
    assert state == 4 * 300 * 62_500 * 4
    assert more < 0.3 * state


def test_the_random_state_comes_back(folder: RunFolder) -> None:
    torch.manual_seed(11)
    path = save(folder.path, 8)
    expected = torch.rand(3)
    open_checkpoint(path).restore(Held())
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_of_format_1_still_loads(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    torch.manual_seed(11)
    tensors = WHOLE | {"random/cpu": torch.get_rng_state()}
    expected = torch.rand(3)
    position = {"step": 6, "samples": 24, "tokens": 744, "bad_steps": 0}
    state = {"position": position, "layout": {"micro_batch": 4, "accumulation": 1},
             "config": CONFIG, "data": {}, "engine": {"steps": 6}}  # fmt: skip
    with commit_folder(run.checkpoint(6), format=1, step=6) as folder:
        save_file(tensors, folder / "state.safetensors")
        write_json(folder / "state.json", state)
    assert check_loads(str(tmp_path)).layout == LAYOUT
    assert torch.equal(torch.rand(3), expected)


def task_save(folder: str, step: int = 6) -> Tensor:
    torch.manual_seed(100 + dist.get_rank())
    save(folder, step)
    return torch.rand(3)


def task_load(folder: str) -> Tensor:
    torch.manual_seed(0)
    check_loads(folder)
    return torch.rand(3)


def test_what_ranks_wrote_together_loads_on_any_number_of_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = ranks.run(2, task_save, str(tmp_path))
    path = RunFolder(tmp_path).checkpoint(6)
    assert {x.name for x in path.iterdir()} == {
        "part-0.safetensors", "part-1.safetensors", "pieces.json", "state.json", "manifest.json",
    }  # fmt: skip
    written = json.loads((path / "pieces.json").read_text())
    assert len(written["model/a"]["pieces"]) == len(written["master/a"]["pieces"]) == 2
    assert len(written["model/b"]["pieces"]) == len(written["optimizer/a/step"]["pieces"]) == 1
    assert check_loads(str(tmp_path)).ranks == 2
    again = ranks.run(2, task_load, str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    four = ranks.run(4, task_load, str(tmp_path))
    assert len({tuple(x.tolist()) for x in four}) == 4  # each rank has its own
    assert torch.equal(ranks.run(4, task_load, str(tmp_path))[1], four[1])


def test_what_one_process_wrote_loads_on_several(ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path)
    ranks.run(2, task_load, str(tmp_path))


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """As on a full disk: no file can grow beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def task_full_disk(folder: str, full: int, limit: int) -> str:
    """Rank `full` cannot write more than `limit` bytes into one file."""
    engine = Held()
    engine.values = {"steps": 8, "much": "x" * 20_000}  # in state.json, which rank 0 writes
    limits = small_files(limit) if dist.get_rank() == full else nullcontext()
    with limits, pytest.raises(RequestError) as raised:
        save(folder, 8, engine)
    check_loads(folder)
    return str(raised.value)


@pytest.mark.parametrize(("full", "limit"), [(1, 1000), (0, 1000), (0, 8000)])
def test_a_rank_that_cannot_write_makes_all_fail_and_nothing_is_left(
    full: int, limit: int, ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(2, task_save, str(tmp_path))
    said = ranks.run(2, task_full_disk, str(tmp_path), full, limit)
    assert all("the disk is full" in x for x in said)
    assert said[1 - full].startswith(f"rank {full}: ")
    assert [x.name for x in RunFolder(tmp_path).checkpoints.iterdir()] == ["step-6"]


def task_damage(folder: str) -> list[str]:
    found, problems = newest_checkpoint(RunFolder(Path(folder)))
    assert found is not None
    return [str(found.position.step), *(text for _, text in problems)]


def test_damage_is_found_by_one_rank_and_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    for step in (2, 4):
        ranks.run(2, task_save, str(tmp_path), step)
    path = RunFolder(tmp_path).checkpoint(4) / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for step, problem in ranks.run(2, task_damage, str(tmp_path)):
        assert step == "2"
        assert "damaged: part-1.safetensors" in problem


def task_fails() -> None:
    def action() -> int:
        if dist.get_rank() == 1:
            raise KeyError("x")
        return dist.get_rank()

    assert on_every_rank(dist.get_rank) == [0, 1]
    with pytest.raises(KeyError if dist.get_rank() else TrainingFailed, match=r"x"):
        on_every_rank(action)


def test_an_error_of_one_rank_reaches_all(ranks: Ranks) -> None:
    ranks.run(2, task_fails)


def task_apart(folder: str) -> str:
    """The same relative path, from a folder of this rank's own: as on two machines' disks."""
    here, own = Path.cwd(), Path(folder) / str(dist.get_rank())
    own.mkdir()
    os.chdir(own)
    try:
        with pytest.raises(RequestError) as raised:
            save("run")
    finally:
        os.chdir(here)
    assert list(own.rglob("*step*")) == []
    return str(raised.value)


def test_a_folder_that_is_not_shared_is_explained(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(2, task_apart, str(tmp_path)):
        assert "not on storage that rank 1 shares with rank 0" in said
