"""The engine `process`: one task after the other, here."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from rostra.data.tasks import Do, Task, Tell


class ProcessEngine:
    """Does tasks in this process; the tokenizer may use all its cores."""

    def run(self, tasks: Sequence[Task], do: Do, tell: Tell) -> Generator[Task, None, None]:
        for task in tasks:
            do(task, tell)
            yield task
