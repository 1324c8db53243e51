"""What happens in a run, as a stream of events that others subscribe to.

The loop emits; progress bar, log, trackers and reports listen. `events.jsonl` holds every
event, and is enough to rebuild every picture of the run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

# The kinds of events, and the fields each carries at the least.
KINDS: dict[str, tuple[str, ...]] = {
    "started": ("name", "layout", "parameters", "trainable_parameters", "steps", "step"),
    "plan": ("memory_bytes", "step_seconds", "tokens_per_second"),
    "plan_checked": ("step", "planned", "measured"),
    "step": ("step", "loss", "tokens", "learning_rate", "gradient_norm", "seconds", "accepted"),
    "memory": ("step", "bytes"),
    "evaluation": ("step", "loss", "perplexity", "bits_per_byte", "seconds"),
    "generation": ("step", "prompt", "text"),
    "checkpoint": ("step", "path", "seconds"),
    "notice": ("message",),
    "finished": ("step", "summary"),
    "stopped": ("step", "reason"),
}


@dataclass(frozen=True)
class Event:
    kind: str
    time: float  # seconds since 1970
    fields: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]


Listener = Callable[[Event], None]


@dataclass
class Events:
    """The stream of one run. Listeners are called in the order they subscribed."""

    clock: Callable[[], float] = time.time
    listeners: list[Listener] = field(default_factory=list)

    def subscribe(self, listener: Listener) -> None:
        self.listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> Event:
        missing = [key for key in KINDS[kind] if key not in fields]
        if missing:
            raise ValueError(f"event {kind!r} lacks {', '.join(missing)}")
        event = Event(kind, self.clock(), fields)
        for listener in self.listeners:
            listener(event)
        return event

    def notice(self, message: str) -> None:
        """Something a person should know; not an error."""
        self.emit("notice", message=message)


class JsonLines:
    """Appends every event to a file, one JSON object a line, flushed at once.

    Listens from the start; what happens before the file is opened is kept and written then.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._early: list[Event] = []

    def open(self, path: Path) -> None:
        end_line(path)
        self._file = path.open("a", encoding="utf-8")
        for event in self._early:
            self(event)

    def __call__(self, event: Event) -> None:
        if self._file is None:
            self._early.append(event)
            return
        fields = plain(event.fields)
        line = {"time": round(event.time, 3), "event": event.kind, **fields}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def plain(value: Any) -> Any:
    """The value with null for numbers that are not finite: JSON has none for them."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def end_line(path: Path) -> None:
    """Close a line that a killed process left open, so that appending cannot merge two."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")


def read_events(path: Path) -> Iterator[Event]:
    """The events of `path`; a line cut off by a kill is passed over."""
    with path.open(encoding="utf-8") as file:
        for text in file:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            yield Event(line.pop("event"), line.pop("time"), line)
