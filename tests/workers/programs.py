"""What ranks run in these tests: `programs NAME ARGUMENTS`, one function a name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

RANK = int(os.environ.get("RANK", "0"))


def codes(*each: str) -> None:
    """Ranks end with the given codes, in the order of their ranks."""
    time.sleep(0.3 * RANK)
    sys.exit(int(each[RANK]))


def first(code: str) -> None:
    """Rank 1 ends with `code`; rank 0 would run on."""
    if RANK == 1:
        print("rank one has a reason", file=sys.stderr)
        sys.exit(int(code))
    time.sleep(60)


def talk(*arguments: str) -> None:
    print("said", RANK, sys.argv[1:])
    print("terminal", RANK, sys.stderr.isatty(), file=sys.stderr)


def die(number: str) -> None:
    """A signal ends rank 1; rank 0 would run on."""
    if RANK == 1:
        os.kill(os.getpid(), int(number))
    time.sleep(60)


def save(folder: str, seconds: str) -> None:
    """Rank 0 saves for `seconds` after a signal, the others are done at once; all stop."""
    received: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    (Path(folder) / f"pid-{RANK}").write_text(str(os.getpid()))
    while not received:
        time.sleep(0.02)
    until = time.monotonic() + (float(seconds) if RANK == 0 else 0.0)
    while time.monotonic() < until:
        time.sleep(0.02)
    (Path(folder) / f"saved-{RANK}").write_text(" ".join(received))
    sys.exit(75)


def wait(folder: str) -> None:
    """Ranks that know nothing of signals."""
    (Path(folder) / f"pid-{RANK}").write_text(str(os.getpid()))
    time.sleep(60)


def group(folder: str) -> None:
    """All ranks form a group, twice, and sum their ranks plus one."""
    import torch
    import torch.distributed as dist

    from rostra.workers import detect, joined

    world = detect(os.environ)
    sums = []
    for _ in range(2):
        with joined(world, torch.device("cpu"), 60.0, 60.0) as device:
            total = torch.tensor(float(world.rank + 1), device=device)
            dist.all_reduce(total)
            sums.append(total.item())
            threads = torch.get_num_threads()
        assert not dist.is_initialized()
    text = f"{world.launcher} {world.local_rank} {world.local_size} {sums} {threads}"
    (Path(folder) / f"group-{world.rank}").write_text(text)


def leave(how: str) -> None:
    """Rank 1 fails while rank 0 waits for it in a collective."""
    import torch
    import torch.distributed as dist

    from rostra.workers import detect, joined

    with joined(detect(os.environ), torch.device("cpu"), 60.0, 60.0):
        dist.barrier()
        if RANK == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the reason of rank 1")
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
