"""What Spark and Slurm share: tasks done by processes that only share a folder with this one."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

from rostra.data.folders import read_json, write_json
from rostra.data.tasks import Do, Task, Tell, complete_tasks, read_record
from rostra.errors import RequestError, RostraError

FAILED = "failed.json"


def do_each(do: Do, tasks: Iterable[Task]) -> None:
    """Over there: do those tasks that are not complete. What fails is left in the folder, for
    the one that waits.

    Raises:
        RostraError: when a task failed.
    """
    for task in tasks:
        if read_record(do.work, do.stage, task.number) is not None:
            continue  # another start of the same work has done it
        try:
            do(task, lambda *_: None)
        except RostraError as error:
            _fail(do, str(error), isinstance(error, RequestError))
            raise
        except Exception as error:
            said = f"preparing {task.reader.key} failed:\n{traceback.format_exc()}"
            _fail(do, said, isinstance(error, OSError))
            raise RostraError(said) from error


def _fail(do: Do, message: str, request: bool) -> None:
    write_json(do.work, FAILED, {"message": message, "request": request})


def complete_afar(
    tasks: Sequence[Task],
    do: Do,
    tell: Tell,
    ended: Callable[[], str | None],
    seconds: float,
) -> Iterator[Task]:
    """Here: hand out tasks as their records appear.

    Args:
        ended: tells why nobody works any more; None while somebody does.
        seconds: between two looks; more when looking takes long.

    Raises:
        RostraError: the error of a task, and when all have ended but not all tasks are complete.
    """
    missing = {task.number: task for task in tasks}
    while missing:
        why = ended()  # before looking: what was done until then is seen
        started = time.monotonic()
        for number in sorted(complete_tasks(do.work, do.stage, list(missing.values()))):
            record = read_record(do.work, do.stage, number) or {}
            tell(record.get("documents", 0), record.get("bytes", 0))
            yield missing.pop(number)
        if (failed := read_json(do.work, FAILED)) is not None and missing:
            raise (RequestError if failed["request"] else RostraError)(failed["message"])
        if missing and why is not None:
            raise RostraError(
                f"{why}, and {len(missing):,} of {len(tasks):,} tasks are not complete. Start the "
                "same command again: it goes on with these."
            )
        if missing:
            time.sleep(max(seconds, 10 * (time.monotonic() - started)))


def forget_failure(do: Do) -> None:
    """Of an earlier start."""
    write_json(do.work, FAILED, None)
