"""Tasks: what preparing is cut into, so that any engine can do it in any order.

A task is some parts of one source. What it writes depends on nothing but these and the job, it
is complete when its record is there, and a complete one is never done again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from rostra.data.examples import ExampleReader
from rostra.data.folders import Folder, read_json, write_json
from rostra.data.sources import Part, Reader

Tell = Callable[[int, int], None]  # documents and bytes that were just done


@dataclass(frozen=True)
class Task:
    """Some parts of one source; `number` is its place among all tasks."""

    number: int
    reader: Reader | ExampleReader
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(part.size for part in self.parts)


def tasks_of(work: Iterable[tuple[Reader | ExampleReader, Part]], task_bytes: int) -> list[Task]:
    """The parts of all sources, in their order, in tasks of about `task_bytes`."""
    tasks: list[Task] = []
    parts: list[Part] = []
    size, of = 0, None
    for reader, part in work:
        if of is not None and (size >= task_bytes or reader.index != of.index):
            tasks.append(Task(len(tasks), of, tuple(parts)))
            parts, size = [], 0
        of = reader
        parts.append(part)
        size += part.size
    if of is not None:
        tasks.append(Task(len(tasks), of, tuple(parts)))
    return tasks


class Do(Protocol):
    """What is done with each task of a stage: a value that can be sent to other processes."""

    stage: ClassVar[str]

    @property
    def work(self) -> Folder:
        """Where records go."""

    def __call__(self, task: Task, tell: Tell) -> None:
        """Do it, ending with its record. Errors that a user can cause are RequestErrors."""


class Engine(Protocol):
    """What does tasks."""

    def run(self, tasks: Sequence[Task], do: Do, tell: Tell) -> Generator[Task, None, None]:
        """Do the tasks, in any order; each is handed out when its record is there.

        Raises:
            RequestError: of the first task that failed by it.
            RostraError: when a task cannot be done though it was tried several times.
        """


def record_name(stage: str, number: int) -> str:
    return f"{stage}/{number:05d}.json"


def write_record(do: Do, task: Task, record: dict[str, Any]) -> None:
    """Complete a task; all that it wrote must be in place."""
    write_json(do.work, record_name(do.stage, task.number), record)


def read_record(work: Folder, stage: str, number: int) -> dict[str, Any] | None:
    """What a task's record says; None when it is not complete."""
    record = read_json(work, record_name(stage, number))
    return record if isinstance(record, dict) else None


def complete_tasks(work: Folder, stage: str, tasks: Sequence[Task]) -> set[int]:
    """The numbers of those tasks that are complete."""
    names = work.names(stage)
    return {task.number for task in tasks if record_name(stage, task.number) in names}
