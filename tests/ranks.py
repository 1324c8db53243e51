"""Ranks for tests: one pool of started processes that meet over gloo, kept for the session.

Starting a process and importing torch and transformers takes seconds, joining a group
milliseconds: the pool is started once, grown when a test needs more ranks, and started afresh
after a task that failed or hung.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 120.0  # after which a task of ranks has hung


class RankFailed(AssertionError):
    """A task raised on some rank; the message has its traceback."""


class Ranks:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, size: int, task: Callable[..., Any], *args: Any) -> list[Any]:
        """`task(*args)` on ranks 0 to size - 1 of a gloo group; what each returned.

        `task` is a function of a module's top level; what it returns is pickled (tensors go as
        they are). Raises RankFailed with the traceback of the first rank that failed.
        """
        while len(self._workers) < size:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                self._workers[rank][1].send((sys.path, f"{folder}/store", rank, size, task, args))
            answers = self._collect(size)
        failed = [(rank, what) for rank, (right, what) in answers.items() if not right]
        if failed:
            self.close()
            raise RankFailed("\n".join(f"rank {rank}: {what}" for rank, what in failed))
        return [answers[rank][1] for rank in range(size)]

    def _collect(self, size: int) -> dict[int, tuple[bool, Any]]:
        """Answers by rank; once a rank has failed, the others get a moment and no more."""
        waiting = {self._workers[rank][1]: rank for rank in range(size)}
        answers: dict[int, tuple[bool, Any]] = {}
        seconds = SECONDS
        while waiting:
            ready = wait(list(waiting), seconds)
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                answers[min(waiting.values())] = (False, f"ranks {late} gave no answer")
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, "the process ended")
                if not answers[rank][0]:
                    seconds = 2.0
        return answers

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        os.environ.pop("OMP_NUM_THREADS") if before is None else None
        theirs.close()
        self._workers.append((process, ours))

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist
    import transformers  # noqa: F401  what takes the time

    torch.set_num_threads(1)
    while True:
        try:
            path, store, rank, size, task, args = connection.recv()
        except EOFError:
            return
        sys.path[:] = path
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=SECONDS),
            )
            torch.manual_seed(0)
            answer = (True, task(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        connection.send(answer)
