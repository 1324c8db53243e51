"""Ranks come together, and part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rostra.errors import RequestError
from rostra.workers import World, free_port, joined
from rostra.workers.group import cores

CPU = torch.device("cpu")
PROGRAMS = Path(__file__).parent / "programs.py"
# Of two meetings, and the threads of each of two ranks.
SUMS = f"[3.0, 3.0] {max(1, cores() // 2)}"


def test_one_process_is_a_group_of_one() -> None:
    for _ in range(2):
        with joined(World(), CPU, 10.0) as device:
            assert device == CPU
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            assert "RANK" not in os.environ
        assert not dist.is_initialized()


def test_the_group_goes_after_an_error() -> None:
    with pytest.raises(ValueError, match="mine"), joined(World(), CPU, 10.0):
        raise ValueError("mine")
    assert not dist.is_initialized()


def test_a_group_that_was_destroyed_inside() -> None:
    with joined(World(), CPU, 10.0):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_too_few_ranks() -> None:
    port = free_port()
    world = World(0, 2, 0, 2, "torchrun", "127.0.0.1", port)
    message = f"only 1 of 2 ranks came to 127.0.0.1:{port} within 1 s"
    with pytest.raises(RequestError, match=message), joined(world, CPU, 1.0):
        pass
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_nobody_at_the_address() -> None:
    port = free_port()
    world = World(1, 2, 1, 2, "torchrun", "127.0.0.1", port)
    message = f"rank 1 of 2 could not reach rank 0 at 127.0.0.1:{port}"
    with pytest.raises(RequestError, match=message), joined(world, CPU, 1.0):
        pass


def test_under_mpirun(tmp_path: Path) -> None:
    """No agent: rank 0 listens itself. The variables are those that Open MPI sets."""
    environ = {**os.environ, "MASTER_PORT": str(free_port()), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    environ |= {"OMPI_COMM_WORLD_SIZE": "2", "OMP_NUM_THREADS": "64"}
    started = []
    for rank in ("0", "1"):
        own = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        command = [sys.executable, str(PROGRAMS), "group", str(tmp_path)]
        started.append(subprocess.Popen(command, env=environ | own))
    assert [process.wait(120) for process in started] == [0, 0]
    assert [said(tmp_path, rank) for rank in range(2)] == [f"mpi {r} 2 {SUMS}" for r in range(2)]


@pytest.mark.soak  # a run under torchrun: `tests/train/test_ranks_end_to_end.py`
def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(PROGRAMS), "group", str(tmp_path)],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "64"},
    )
    assert [said(tmp_path, r) for r in range(2)] == [f"torchrun {r} 2 {SUMS}" for r in range(2)]


def said(folder: Path, rank: int) -> str:
    return (folder / f"group-{rank}").read_text()
