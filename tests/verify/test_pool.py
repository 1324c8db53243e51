"""Started processes as groups of ranks: results, failures, and their own end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import RankFailed, Ranks
from rostra.errors import RequestError


def summed(value: Tensor) -> tuple[int, Tensor]:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return os.getpid(), total


def refused() -> None:
    raise RequestError(f"not so: {dist.get_world_size()}")


def failing(rank: int) -> None:
    """One rank fails while the others wait for it."""
    if dist.get_rank() == rank:
        raise ValueError("as the test wants it")
    dist.barrier()


def killed(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_ranks_form_groups_and_give_results(ranks: Ranks) -> None:
    (one, first), (other, second) = ranks.run(2, summed, torch.arange(3.0))
    assert one != other
    assert first.tolist() == second.tolist() == [0.0, 3.0, 6.0]


def test_what_all_ranks_refuse_is_raised_and_they_go_on() -> None:
    with Ranks() as pool:
        before = [pid for pid, _ in pool.run(2, summed, torch.zeros(1))]
        with pytest.raises(RequestError, match="not so: 2"):
            pool.run(2, refused)
        assert [pid for pid, _ in pool.run(2, summed, torch.zeros(1))] == before


def test_a_failure_is_told_and_the_processes_are_started_afresh() -> None:
    with Ranks() as pool:
        with pytest.raises(RankFailed, match=r"rank 1: Traceback[^$]*as the test wants it"):
            pool.run(2, failing, 1)
        with pytest.raises(RankFailed, match="rank 0: killed by signal 9"):
            pool.run(2, killed, 0)
        assert len(pool.run(1, summed, torch.ones(1))) == 1


def test_ranks_do_not_outlive_the_process_that_started_them() -> None:
    program = (
        "import psutil, time\n"
        "from rostra.workers.pool import Pool\n"
        "Pool().grow(2)\n"
        "print(*(child.pid for child in psutil.Process().children()), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    gone = time.monotonic() + 30
    while any(_alive(pid) for pid in pids) and time.monotonic() < gone:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
