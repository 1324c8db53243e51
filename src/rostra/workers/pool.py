"""Started processes that come together as gloo groups, task after task.

Starting a process and importing torch and transformers takes seconds, joining a group
milliseconds: the processes are kept from one task to the next, and started afresh after a task
that failed or hung. Each computes with one thread, as they share the cores of one machine.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from rostra.errors import RostraError
from rostra.workers.group import leave
from rostra.workers.rank import end_with

_GRACE = 2.0  # seconds that the other ranks have once one has failed


class RankFailed(Exception):
    """A task failed on some rank; the message has the traceback of each that did."""


class Pool:
    """Processes of this machine that run a task as the ranks of a group.

    They import torch at once and start working while this process goes on. Each is killed when
    the pool is closed, when Python leaves, and when this process is gone. What they print goes
    to standard error.
    """

    def __init__(self, seconds: float = 120.0, quiet: bool = False) -> None:
        """`seconds` after which a task that has not ended has hung. `quiet` drops what the
        processes print; tracebacks are told all the same."""
        self.seconds, self.quiet = seconds, quiet
        self._workers: list[_Worker] = []
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grow(self, size: int) -> None:
        """Start processes until there are `size`, without waiting for them."""
        while len(self._workers) < size:
            self._workers.append(_Worker(self.quiet))

    def run(self, size: int, task: Callable[..., Any], *args: Any) -> list[Any]:
        """`task(*args)` on ranks 0 to size - 1 of a gloo group; what each returned.

        `task` is a function of the top level of a module that the processes can import (not
        `__main__`); it, `args` and what it returns are pickled, tensors with their values.
        Raises the RostraError that the task raised, the same on all ranks; RankFailed for all
        else, and when a rank gave no answer in time or ended.
        """
        self.grow(size)
        with tempfile.TemporaryDirectory(prefix="rostra-pool-") as folder:
            for rank, worker in enumerate(self._workers[:size]):
                meeting = (f"{folder}/store", rank, size, self.seconds)
                worker.send(sys.path, (meeting, task, args))
            answers = self._collect(size)
        failed = [f"rank {r}: {a}" for r, (end, a) in answers.items() if end == "failed"]
        refused = [a for end, a in answers.values() if end == "refused"]
        if failed or 0 < len(refused) < size:  # some may be waiting for the others
            self.close()
        if refused:
            raise refused[0]
        if failed:
            raise RankFailed("\n".join(failed))
        return [answers[rank][1] for rank in range(size)]

    def _collect(self, size: int) -> dict[int, tuple[str, Any]]:
        """Answers by rank: how the task ended, and its result, error, or traceback."""
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers[:size])}
        answers: dict[int, tuple[str, Any]] = {}
        seconds = self.seconds
        while waiting:
            ready = wait(list(waiting), seconds)
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                answers[min(waiting.values())] = ("failed", f"ranks {late} gave no answer")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = _read(connection.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = ("failed", self._workers[rank].ended())
                if answers[rank][0] != "done":
                    seconds = _GRACE
        return answers

    def close(self) -> None:
        """Kill the processes; `run` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []


class _Worker:
    """One process, and the connection to it."""

    def __init__(self, quiet: bool) -> None:
        ours, theirs = socket.socketpair()
        command = ["-P", "-m", "rostra.workers.pool", str(os.getpid()), str(theirs.fileno())]
        self._process = subprocess.Popen(
            [sys.executable, *command],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else 2,  # standard output is for results
            stderr=subprocess.DEVNULL if quiet else None,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    def send(self, path: list[str], work: Any) -> None:
        """`path` comes first: with it, what `work` names is found."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # no answer will come
            for message in (path, work):
                self.connection.send_bytes(_written(message))

    def ended(self) -> str:
        """How the process came to its end, once it has closed the connection."""
        self._process.kill()  # in case it has closed that alone
        code = self._process.wait()
        return f"the process ended with code {code}" if code >= 0 else f"killed by signal {-code}"

    def kill(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def _written(message: Any) -> bytes:
    """Pickled as torch does it, which alone takes tensors of every type. What is read was
    written by this program's own other end."""
    import torch

    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def _read(message: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(message), weights_only=False)


def _serve(connection: Connection) -> None:
    import torch
    import transformers  # noqa: F401  what takes the time

    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:] = _read(connection.recv_bytes())
            work = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(_written(_answer(work)))


def _answer(work: bytes) -> tuple[str, Any]:
    """How the task ended: ("done", its result), ("refused", its RostraError) or ("failed", the
    traceback)."""
    import torch
    import torch.distributed as dist

    try:
        (store, rank, size, seconds), task, args = _read(work)
        gc.freeze()  # what is imported by now stays: collecting after the task is then quick
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        torch.manual_seed(0)
        return "done", task(*args)
    except RostraError as error:
        return "refused", error
    except BaseException:
        return "failed", traceback.format_exc()
    finally:
        with contextlib.suppress(Exception):
            leave()


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    _serve(Connection(int(sys.argv[2])))
