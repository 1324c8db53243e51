"""The engine `local`: processes of this machine, one a core.

Each is a fresh interpreter (nothing is forked from a process that has threads, and a script
needs no `__main__` guard) that is sent tasks over a pipe. It dies with the one that started it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Generator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from rostra.data.tasks import Do, Task, Tell
from rostra.errors import RostraError

TRIES = 3  # a task that its worker died of


class Worker:
    """One process, and the task that it has."""

    def __init__(self, do: Do) -> None:
        self.connection, theirs = Pipe()
        self.task: Task | None = None
        environment = {
            **os.environ,
            "RAYON_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "rostra.data.engines.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
        )
        theirs.close()
        with contextlib.suppress(BrokenPipeError):  # it died: that is seen when it is heard
            self.connection.send(do)

    def give(self, task: Task) -> None:
        self.task = task
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(task)

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class LocalEngine:
    """Does tasks in so many processes."""

    def __init__(self, workers: int) -> None:
        self._count = workers

    def run(self, tasks: Sequence[Task], do: Do, tell: Tell) -> Generator[Task, None, None]:
        waiting, deaths = deque(tasks), Counter[int]()
        workers: dict[Connection, Worker] = {}

        def hire() -> None:
            worker = Worker(do)
            workers[worker.connection] = worker
            worker.give(waiting.popleft())

        try:
            for _ in range(min(self._count, len(tasks))):
                hire()
            while workers:
                for heard in wait(list(workers)):
                    worker = workers[heard]  # type: ignore[index]
                    try:
                        done = _hear(worker, tell)
                    except EOFError:  # it died
                        waiting.appendleft(_tried_again(worker, deaths))
                    else:
                        if done is None:
                            continue
                        yield done
                        if waiting:
                            worker.give(waiting.popleft())
                            continue
                    del workers[worker.connection]
                    worker.end()
                    if waiting:
                        hire()
        finally:
            for worker in workers.values():
                worker.end()


def _hear(worker: Worker, tell: Tell) -> Task | None:
    """The task that is done; None when there is only news of it.

    Raises:
        EOFError: when the worker died.
        RostraError, OSError: when the task failed.
    """
    try:
        said = worker.connection.recv()
    except OSError as error:  # in the middle of saying something
        raise EOFError from error
    if isinstance(said, RostraError | OSError):
        raise said
    if said is not None:
        tell(*said)
        return None
    done, worker.task = worker.task, None
    return done


def _tried_again(worker: Worker, deaths: Counter[int]) -> Task:
    """The task of a worker that died.

    Raises:
        RostraError: when it was tried often enough.
    """
    task = worker.task
    assert task is not None
    deaths[task.number] += 1
    if deaths[task.number] == TRIES:
        code = worker.process.wait()
        names = [part.name for part in (task.parts[0], task.parts[-1])]
        raise RostraError(
            f"preparing {task.reader.key}, {' to '.join(dict.fromkeys(names))}: the process that "
            f"did it died {TRIES} times (the last time with code {code}; -9 may be for want of "
            "memory). Look at these files, or use fewer processes (data.prepare.workers), then "
            "start the same command again: what was complete is kept."
        )
    return task
