"""Ranks for tests: one pool of processes for the whole session, see the fixture `ranks`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from rostra.workers.pool import Pool, RankFailed

__all__ = ["RankFailed", "Ranks"]


class Ranks(Pool):
    """A pool that runs very many short tasks."""

    def run(self, size: int, task: Callable[..., Any], *args: Any) -> list[Any]:
        return super().run(size, _run, task, args)


def _run(task: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Modules that earlier tasks and this one have imported stay: collecting garbage after the
    task, which otherwise takes longer than most tasks, need not look at them again."""
    gc.freeze()
    return task(*args)
