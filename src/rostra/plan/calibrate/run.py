"""`rostra calibrate`: all measurements of this machine, in about a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from rostra.hardware import best_device, supports, usable_cores
from rostra.memory import keep_freed_memory
from rostra.plan.calibrate import compute, layers, transfer
from rostra.plan.calibrate.compute import Bench
from rostra.plan.calibrate.figure import Figure
from rostra.plan.calibrate.values import Calibration, Share
from rostra.workers.pool import Pool

CPU = torch.device("cpu")
_MOST = 1 << 31  # operations of one measurement on a CPU
_MOST_ON_GPU = 1 << 43
Say = Callable[[str], None]


def calibrate(
    say: Say = print,
    folder: Path | None = None,
    shares: Sequence[tuple[int, int]] | None = None,
    most: int | None = None,
    counts: Sequence[int] | None = None,
) -> Calibration:
    """Measure this machine: its GPUs where it has any, else its CPU. `say` is told what is being
    measured; the disk is that of `folder` (the current one when not given). `shares` are the
    (ranks, threads of each) to measure, by default those that training starts, and
    `counts` the numbers of ranks that send; `most` are the operations of one measurement."""
    began = time.perf_counter()
    device = best_device()
    on_gpu = device.type == "cuda"
    count = torch.cuda.device_count() if on_gpu else 0
    most = most or (_MOST_ON_GPU if on_gpu else _MOST)
    shares = shares or ([(1, 1)] if on_gpu else shares_of(usable_cores()))
    with Pool(seconds=600, quiet=True) as pool:
        pool.grow(max(ranks for ranks, _ in shares))
        measured = []
        for ranks, threads in shares:
            say(f"computing: {_told(ranks, 'rank')}, {_told(threads, 'thread')} each")
            found = pool.run(ranks, compute_figures, device.type, threads, most)
            measured.append(Share(ranks, threads, tuple(found[0])))
        links: list[Figure] = []
        for ranks in counts or link_counts(count if on_gpu else usable_cores(), on_gpu):
            say(f"sending: {_told(ranks, 'rank')}")
            links += pool.run(ranks, link_figures, device.type)[0]
    say("the disk")
    written = tuple(transfer.disk(folder or Path.cwd(), min(2**28, most)))
    seconds = round(time.perf_counter() - began, 1)
    return Calibration(device.type, tuple(measured), tuple(links), written, seconds)


def shares_of(cores: int) -> list[tuple[int, int]]:
    """One rank with all cores, one with a single thread, and a rank of one thread for each."""
    return list(dict.fromkeys([(1, cores), (1, 1), (cores, 1)]))


def link_counts(devices: int, on_gpu: bool) -> list[int]:
    """Numbers of ranks whose collectives are measured. CPU ranks may share cores."""
    if on_gpu:
        return sorted({n for n in (2, devices) if 2 <= n <= devices})
    return sorted({2, 4, max(2, devices)})


def compute_figures(kind: str, threads: int, most: int) -> list[Figure]:
    """What a rank of a pool measures by itself, while the others do the same."""
    device = torch.device(kind)
    precisions = ["fp32", "bf16"]
    if kind == "cpu":
        torch.set_num_threads(threads)
        keep_freed_memory(True)  # as training does
    elif supports(device, "fp16"):
        precisions.append("fp16")
    bench = Bench(device, threads, most)
    try:
        return list(_figures(bench, precisions))
    finally:
        if kind == "cpu":
            torch.set_num_threads(1)


def _figures(bench: Bench, precisions: Sequence[str]) -> Iterator[Figure]:
    for precision in precisions:
        yield from compute.products(bench, precision)
        yield from compute.attention(bench, precision)
        yield from layers.between(bench, precision)
        yield layers.loss(bench, precision)
    yield from compute.pointwise(bench)
    yield from compute.launches(bench)
    yield from compute.updates(bench)
    yield from compute.host_copies(bench)


def link_figures(kind: str) -> list[Figure]:
    """What ranks of a pool measure together."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, torch.distributed.get_rank())
        torch.cuda.set_device(device)
    return list(transfer.links(device))


def _told(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
