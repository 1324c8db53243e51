"""What Spark and Slurm share: tasks done by processes that only share a folder with this one."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from rostra.data.folders import Folder, read_json, write_json
from rostra.data.tasks import Do, Task, Tell, complete_tasks, read_record
from rostra.errors import RequestError, RostraError

FAILED = "failed.json"


@contextlib.contextmanager
def failures_left(work: Folder, who: str) -> Iterator[None]:
    """Over there: what fails is left in the folder, for the one that waits.

    Args:
        who: is doing it, for the message.

    Raises:
        RostraError: the same, so that the process fails too.
    """
    try:
        yield
    except Exception as error:
        foreseen = isinstance(error, RostraError | OSError)
        said = str(error) if foreseen else traceback.format_exc().strip()
        request = isinstance(error, RequestError | OSError)
        write_json(work, FAILED, {"message": f"{who}: {said}", "request": request})
        raise RostraError(said) from error


def do_each(do: Do, tasks: Iterable[Task]) -> None:
    """Over there: do those tasks that are not complete."""
    for task in tasks:
        # Another start of the same work may have done it.
        if read_record(do.work, do.stage, task.number) is None:
            do(task, lambda *_: None)


def complete_afar(
    tasks: Sequence[Task],
    do: Do,
    tell: Tell,
    ended: Callable[[], str | None],
    seconds: float,
) -> Generator[Task, None, str]:
    """Here: hand out tasks as their records appear, until all are complete or nobody works any
    more: then why, else nothing.

    Args:
        ended: tells why nobody works any more; None while somebody does.
        seconds: between two looks; more when looking takes long.

    Raises:
        RostraError: the first error of a task that is left in the folder.
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
            return why
        if missing:
            time.sleep(max(seconds, 10 * (time.monotonic() - started)))
    return ""


def incomplete(why: str, do: Do, tasks: Sequence[Task]) -> RostraError:
    """What to raise when nobody works any more, but tasks are missing."""
    missing = len(tasks) - len(complete_tasks(do.work, do.stage, tasks))
    return RostraError(
        f"{why}, and {missing:,} of {len(tasks):,} tasks are not complete. Start the same command "
        "again: it goes on with these."
    )


def forget_failure(do: Do) -> None:
    """Of an earlier start."""
    write_json(do.work, FAILED, None)
