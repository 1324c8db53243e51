"""Batches made before they are asked for, by a thread or by processes of their own."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from rostra.batch import Batch
from rostra.data.loader import Loader, Position
from rostra.data.streaming import StreamLoader
from rostra.errors import RostraError

Place = tuple[int, int]  # of a batch: its first position, and how many samples
Notice = Callable[[str], None]

PROGRAM = "import sys; from rostra.data.read_ahead import work; work(int(sys.argv[1]))"
FAR = 64  # batches ahead, of which one sample is located, so that its shard is at hand in time;
EACH = 8  # in one batch of so many
RESTARTS = 3  # of a worker for one batch, which is then made in this process


class ReadAhead:
    """A loader whose next batches are made beforehand.

    What follows on a batch is foreseen: as many samples, a global batch further. A batch that
    was not foreseen is made at once, so that any may be asked for at any time and is the same
    as the loader's own.
    """

    def __init__(
        self,
        loader: Loader | StreamLoader,
        ahead: int,
        workers: int = 0,
        notice: Notice = lambda _: None,
    ) -> None:
        """
        Args:
            ahead: how many batches a maker has made or makes; 0 for none.
            workers: processes that make them, each for itself; with 0 a thread does.
            notice: told when a worker died and another took its place.
        """
        self.loader = loader
        self._ahead = ahead * max(1, workers)
        self._made: dict[Place, Callable[[], Batch]] = {}
        self._maker: _Thread | _Workers | None = None
        self._scout: _Scout | None = None
        if self._ahead:
            if isinstance(loader, StreamLoader):  # whose lanes have one state
                self._maker = _Thread(loader)
            else:
                self._maker = _Workers(loader, workers, notice) if workers else _Thread(loader)
                self._scout = _Scout(loader)

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions [first, first + count), as the loader makes them."""
        take = self._made.pop((first, count), None)
        step = self.global_batch_size
        expected = [(first + step * n, count) for n in range(1, self._ahead + 1)]
        for place in self._made.keys() - expected:
            del self._made[place]
        if self._maker is not None:
            if take is None and isinstance(self.loader, StreamLoader):
                take = self._maker.ask((first, count))  # which is made in order
            for place in expected:
                if place not in self._made:
                    self._made[place] = self._maker.ask(place)
        if self._scout is not None and first // step % EACH == 0:
            self._scout.look(first + step * FAR)
        return take() if take else self.loader.batch(first, count)

    def close(self) -> None:
        """End the thread or the processes; batches are then made at once."""
        self._made.clear()
        if self._maker is not None:
            self._maker.close()
        if self._scout is not None:
            self._scout.close()
        self._maker = self._scout = None

    @property
    def global_batch_size(self) -> int:
        return self.loader.global_batch_size

    @property
    def sample_tokens(self) -> float:
        return self.loader.sample_tokens

    def check(self, steps: int) -> None:
        self.loader.check(steps)

    def state(self, position: int) -> dict[str, Any] | None:
        return self.loader.state(position)

    def locate(self, position: int) -> Position:
        return self.loader.locate(position)

    def steps(self, epochs: float) -> int:
        return self.loader.steps(epochs)


class _Thread:
    """Makes batches in a thread, in the order in which they were asked for."""

    def __init__(self, loader: Loader | StreamLoader) -> None:
        self._loader = loader
        self._executor = ThreadPoolExecutor(1, "rostra-read-ahead")

    def ask(self, place: Place) -> Callable[[], Batch]:
        made: Future[Batch] = self._executor.submit(self._loader.batch, *place)
        return made.result

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class _Scout:
    """Locates samples far ahead in threads. That opens their shards, so what is on a store is
    downloaded, and hashed, while batches of other shards are read. What fails here will be
    said when the batch is made."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._executor = ThreadPoolExecutor(2, "rostra-scout")
        self._looking: list[Future[Position]] = []

    def look(self, position: int) -> None:
        self._looking = [future for future in self._looking if not future.done()]
        if len(self._looking) < 4:  # when it is slower than training, later ones will do
            self._looking.append(self._executor.submit(self._loader.locate, position))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class _Workers:
    """Makes batches in processes, that take turns."""

    def __init__(self, loader: Loader, count: int, notice: Notice) -> None:
        self._workers = [_Worker(loader, notice) for _ in range(count)]
        self._turn = 0

    def ask(self, place: Place) -> Callable[[], Batch]:
        worker = self._workers[self._turn % len(self._workers)]
        self._turn += 1
        worker.ask(place)
        return lambda: worker.take(place)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process that makes batches. When it dies another takes its place and its work."""

    def __init__(self, loader: Loader, notice: Notice) -> None:
        self._loader = loader
        self._notice = notice
        self._asked: list[Place] = []  # and not answered yet
        self._start()

    def _start(self) -> None:
        self._pipe, self._process = _started(self._loader)
        self.close = weakref.finalize(self, _end, self._pipe, self._process)
        for place in self._asked:
            self._send(place)

    def _send(self, place: Place) -> None:
        with contextlib.suppress(OSError):  # it died: `take` will see that, and ask again
            self._pipe.send(place)

    def ask(self, place: Place) -> None:
        self._asked.append(place)
        self._send(place)

    def take(self, place: Place) -> Batch:
        """The batch there. What was asked for before it is no longer wanted, and let go."""
        died = 0
        while died < RESTARTS:
            try:
                done, answer = self._pipe.recv()
            except (EOFError, OSError):
                died += 1
                del self._asked[: self._asked.index(place) + (died == RESTARTS)]
                self._replace()
                continue
            self._asked.remove(done)
            if done == place:
                if isinstance(answer, Exception):
                    raise answer
                return Batch(**{name: torch.from_numpy(array) for name, array in answer.items()})
        return self._loader.batch(*place)  # perhaps it is what killed them

    def _replace(self) -> None:
        self.close()
        self._notice(f"the loader's process {self._process.pid} died; another takes its place")
        self._start()


def _started(loader: Loader) -> tuple[Connection, subprocess.Popen[bytes]]:
    """A worker and the pipe to it.

    It is a program of its own, not a fork of this one with its threads. No signal to stop
    reaches it: the trainer decides when that is. It ends when its pipe does, so also when this
    process is killed.
    """
    ours, theirs = Pipe()
    with tempfile.TemporaryFile() as file, theirs, _stop_signals_blocked():
        pickle.dump(loader, file)
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
            stdin=file,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    return ours, process


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """For this thread as long as inside, and for good in processes that are started inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(pipe: Connection, process: subprocess.Popen[bytes]) -> None:
    pipe.close()
    process.kill()
    process.wait()


def work(descriptor: int) -> None:
    """What a worker does: load the loader from standard input, and make what is asked for."""
    loader = pickle.load(sys.stdin.buffer)
    pipe: Connection = Connection(descriptor)
    while True:
        try:
            place = pipe.recv()
        except (EOFError, OSError):
            return
        answer: dict[str, Any] | Exception
        try:
            tensors = loader.batch(*place).tensors()
            answer = {name: tensor.numpy() for name, tensor in tensors.items()}
        except RostraError as error:
            answer = error
        except Exception:
            answer = RuntimeError(f"in a process of the loader:\n{traceback.format_exc()}")
        try:
            pipe.send((place, answer))
        except OSError:  # nobody is there any more
            return
