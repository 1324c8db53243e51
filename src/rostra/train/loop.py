"""The training loop, and what happens beside it at certain steps."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from rostra.batch import share_of
from rostra.checkpoint import Position
from rostra.data import Loader, ReadAhead
from rostra.errors import Stopped, TrainingFailed
from rostra.events import Event, Events, Listener
from rostra.memory import Memory
from rostra.parallel import Engine
from rostra.train.step import train_step
from rostra.workers import on_any_rank, on_every_rank


class StopSignal:
    """SIGTERM and Ctrl-C stop at once, but while steps run only after the step; a second
    Ctrl-C ends at once even then. All ranks stop after the same step."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.agreed = False  # all ranks know
        self._at_once = True

    @contextlib.contextmanager
    def after_the_step(self) -> Iterator[None]:
        self._at_once = False
        yield
        self._at_once = True
        if self.asked():
            self._stop()

    def asked(self) -> bool:
        """Whether some rank was told to stop; they all call this."""
        self.agreed = self.agreed or on_any_rank(self.reason is not None)
        return self.agreed

    def __enter__(self) -> StopSignal:
        here = threading.current_thread() is threading.main_thread()  # only it may handle them
        numbers = (signal.SIGTERM, signal.SIGINT) if here else ()
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        if self._at_once:
            self._stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _stop(self) -> None:
        why = self.reason or "another rank"
        raise Stopped(f"stopped by {why}; start the same command again to go on")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def every(period: int, action: Callable[[int], Any], last: int | None = None) -> Listener:
    """Call `action(step)` after every `period` steps, and after step `last`."""

    def listen(event: Event) -> None:
        if event.kind == "step" and (event["step"] % period == 0 or event["step"] == last):
            action(event["step"])

    return listen


class Loop:
    """Runs steps from `position` to `steps`. Steps are counted from 1 in events.

    All that happens beside the step (saving, evaluating, showing) listens to `events`.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Loader | ReadAhead,
        events: Events,
        steps: int,
        bad_steps: int,
    ) -> None:
        self.engine = engine
        self.loader = loader
        self.events = events
        self.steps = steps
        self.bad_steps = bad_steps
        self.position = Position(0, 0, 0)
        # of a global batch, the samples of this rank
        self.first, self.count = share_of(loader.global_batch_size, *engine.place)

    def run(
        self,
        stop: StopSignal,
        until: int | None = None,
        around: AbstractContextManager[Memory | None] | None = None,
    ) -> None:
        """Steps up to `until` or the end; `around`, which measures, is entered for one."""
        end = self.steps if until is None else min(until, self.steps)
        while self.position.step < end and not stop.asked():
            began = time.perf_counter()
            batch = self.loader.batch(self.position.samples + self.first, self.count)
            with around or nullcontext() as memory:
                outcome = train_step(self.engine, batch)
            here = self.position
            self.position = Position(
                here.step + 1,
                here.samples + self.loader.global_batch_size,
                here.tokens + round(outcome.tokens),
                0 if outcome.accepted else here.bad_steps + 1,
                self.loader.state(here.samples + self.loader.global_batch_size),
            )
            seconds = time.perf_counter() - began
            if memory is not None:
                self._tell_memory(memory)
            mixture = self.position.mixture
            self.events.emit(
                "step",
                step=self.position.step,
                **outcome.__dict__,
                seconds=round(seconds, 6),
                **({} if mixture is None else {"source_samples": mixture["seen"]}),
            )
            self._judge(self.position.bad_steps)

    def _tell_memory(self, memory: Memory) -> None:
        """What the fullest rank needs."""
        ranks = on_every_rank(lambda: memory.bytes)
        largest = max(ranks, key=lambda found: found["total"])
        totals = {"ranks": [found["total"] for found in ranks]} if len(ranks) > 1 else {}
        self.events.emit("memory", step=self.position.step, bytes=largest, **totals)

    def _judge(self, bad: int) -> None:
        if bad == 1:
            self.events.notice(
                f"step {self.position.step} was passed over: its loss or gradient is not finite"
            )
        if bad > self.bad_steps:
            raise TrainingFailed(
                f"{bad} steps in a row gave a loss or gradient that is not finite. "
                "Lower optimizer.learning_rate, lengthen schedule.warmup, or use "
                "precision.compute: fp32, in a new run, perhaps --from an earlier checkpoint."
            )
