"""The training loop, and what happens beside it at certain steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rostra.checkpoint import Position
from rostra.data import Loader
from rostra.errors import TrainingFailed
from rostra.events import Event, Events, Listener
from rostra.parallel import Engine
from rostra.train.step import Outcome, train_step


class StopSignal:
    """SIGTERM and Ctrl-C ask the loop to stop after its step; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __enter__(self) -> StopSignal:
        here = threading.current_thread() is threading.main_thread()  # only it may handle them
        numbers = (signal.SIGTERM, signal.SIGINT) if here else ()
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)

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
        self, engine: Engine, loader: Loader, events: Events, steps: int, bad_steps: int
    ) -> None:
        self.engine = engine
        self.loader = loader
        self.events = events
        self.steps = steps
        self.bad_steps = bad_steps
        self.position = Position(0, 0, 0)
        self._bad = 0

    def run(self, stop: StopSignal, until: int | None = None) -> None:
        end = self.steps if until is None else min(until, self.steps)
        while self.position.step < end and stop.reason is None:
            began = time.perf_counter()
            batch = self.loader.batch(self.position.samples, self.loader.global_batch_size)
            outcome = train_step(self.engine, batch)
            self.position = Position(
                self.position.step + 1,
                self.position.samples + len(batch),
                self.position.tokens + outcome.tokens,
            )
            seconds = time.perf_counter() - began
            self.events.emit(
                "step", step=self.position.step, **outcome.__dict__, seconds=round(seconds, 6)
            )
            self._judge(outcome)

    def _judge(self, outcome: Outcome) -> None:
        self._bad = 0 if outcome.accepted else self._bad + 1
        if self._bad == 1:
            self.events.notice(
                f"step {self.position.step} was passed over: its loss or gradient is not finite"
            )
        if self._bad > self.bad_steps:
            raise TrainingFailed(
                f"{self._bad} steps in a row gave a loss or gradient that is not finite. "
                "Lower optimizer.learning_rate, lengthen schedule.warmup, or use "
                "precision.compute: fp32; the last checkpoint is from before."
            )
