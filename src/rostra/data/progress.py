"""How far preparing is: what is told to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a stage, and all of it, is.

    Attributes:
        stage: what is being done.
        share: of all that is to be done, 0 to 1; never falls.
        documents, bytes: done in this stage so far, by this start of the command.
        tasks, of: complete ones of this stage, and all of it.
    """

    stage: str
    share: float
    documents: int
    bytes: int
    tasks: int
    of: int


Show = Callable[[Progress], None]


class Meter:
    """Counts one stage's work, and tells."""

    def __init__(
        self, stage: str, sizes: dict[int, int], done: set[int], span: tuple[int, int], show: Show
    ) -> None:
        """
        Args:
            sizes: bytes of input, by the task's number.
            done: numbers of tasks that were complete before.
            span: how many passes over all input come before this one, and how many there are.
        """
        self._stage, self._sizes, self._span, self._show = stage, sizes, span, show
        self._total = max(1, sum(sizes.values()))
        self._tasks = len(done)
        self._complete = sum(sizes[number] for number in done)
        self._documents = self._bytes = self._ahead = 0
        self._share = 0.0

    def tell(self, documents: int, size: int) -> None:
        """Documents of a task that is not complete yet."""
        self._documents += documents
        self._bytes += size
        self._ahead += size
        self._say()

    def complete(self, number: int) -> None:
        """A task is complete."""
        self._tasks += 1
        self._complete += self._sizes[number]
        self._ahead = 0
        self._say()

    def _say(self) -> None:
        ahead = min(self._ahead, self._total // max(1, len(self._sizes)))
        share = min(1.0, (self._complete + ahead) / self._total)
        self._share = max(self._share, share)
        before, passes = self._span
        whole = (before + self._share) / passes
        args = (self._documents, self._bytes, self._tasks, len(self._sizes))
        self._show(Progress(self._stage, whole, *args))
