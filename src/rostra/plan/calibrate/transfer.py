"""What ranks of one machine send each other, and what its disk writes and reads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from rostra.plan.calibrate.compute import Run
from rostra.plan.calibrate.figure import Figure

# Bytes of a rank's whole tensor, and how often each is sent; the largest between GPUs alone.
TIMES = {2**10: 25, 2**17: 15, 2**21: 9, 2**24: 5}
ON_GPU = {2**28: 5}
_BLOCK = 2**24


def links(device: torch.device) -> Iterator[Figure]:
    """Collectives over all ranks, by bytes: the slowest rank's time. `amount` is what each rank
    sends when they pass parts around a ring (Patarasuk & Yuan 2009): of S bytes in the whole,
    S·(n-1)/n in an all-gather, a reduce-scatter and an all-to-all, twice that in an all-reduce.
    """
    group = _group(device)
    for size, times in {**TIMES, **(ON_GPU if device.type == "cuda" else {})}.items():
        for name, (amount, run) in _exchanges(size, device, group).items():
            seconds, spread = _slowest(times, run, device)
            sizes = (dist.get_world_size(), size)
            yield Figure("link", name, sizes, amount, seconds, spread)


def _exchanges(size: int, device: torch.device, group: Any) -> dict[str, tuple[float, Run]]:
    ranks = dist.get_world_size()
    a, b = (torch.ones(size // 4, device=device) for _ in range(2))
    part = torch.ones(size // 4 // ranks, device=device)
    whole, other = (torch.ones(len(part) * ranks, device=device) for _ in range(2))
    share = size * (ranks - 1) / ranks
    return {
        "all_reduce": (2 * share, lambda: dist.all_reduce(a, group=group)),
        "all_gather": (share, lambda: dist.all_gather_into_tensor(whole, part, group=group)),
        "reduce_scatter": (share, lambda: dist.reduce_scatter_tensor(part, whole, group=group)),
        "all_to_all": (share, lambda: dist.all_to_all_single(other, whole, group=group)),
        "send": (size, lambda: _around(a, b, group)),
    }


def _group(device: torch.device) -> Any:
    """The group of all ranks; on GPUs one of NCCL."""
    return dist.new_group(backend="nccl") if device.type == "cuda" else None


def _around(sent: torch.Tensor, received: torch.Tensor, group: Any) -> None:
    """To the next rank, from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks, group),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _slowest(count: int, run: Run, device: torch.device) -> tuple[float, float]:
    """Seconds of the slowest rank, and their spread: the lower quartile, as other work on the
    machine only delays ranks that wait for each other."""
    times = []
    for _ in range(count + 2):
        dist.barrier()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    found = torch.tensor(times[2:], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    low, middle, high = quantiles(found.tolist(), n=4, method="inclusive")
    return low, (high - low) / 2 / middle


def disk(folder: Path, size: int = 2**28) -> Iterator[Figure]:
    """Writing a file through to the disk, and reading it back when the system has forgotten it;
    `amount` is in bytes. Reading is left out where the system cannot be asked to forget."""
    block = os.urandom(_BLOCK)
    with TemporaryDirectory(dir=folder, prefix="rostra-calibrate-") as inside:
        path = Path(inside, "file")
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(size // _BLOCK):
                file.write(block)
            os.fsync(file.fileno())
        yield Figure("disk", "write", (size,), size, time.perf_counter() - began, 0.0)
        if not hasattr(os, "posix_fadvise"):
            return
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while file.read(_BLOCK):
                pass
        yield Figure("disk", "read", (size,), size, time.perf_counter() - began, 0.0)
