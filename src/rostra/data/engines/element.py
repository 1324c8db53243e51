"""An element of an array job: finds its tasks by what the engine left in the work's folder.

python -m rostra.data.engines.element FOLDER STAGE NUMBER
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import Any

from rostra.config.data import DataSection
from rostra.data.cache import digest
from rostra.data.documents import Documents, Read
from rostra.data.engines.afar import do_each, failures_left
from rostra.data.folders import Folder, folder_at, read_json
from rostra.data.job import list_tasks
from rostra.data.sources import BadRecords
from rostra.data.tasks import Do, Task
from rostra.data.tokenizing import Tokenize
from rostra.errors import RequestError, RostraError


def array_name(stage: str) -> str:
    return f"{stage}-array.json"


def describe(do: Do, elements: Sequence[Sequence[Task]]) -> dict[str, Any]:
    """What elements, with these tasks each, must know: JSON, as no code and no pickle is to be
    read from the folder."""
    assert isinstance(do, Read | Tokenize)
    documents = do.documents
    return {
        "data": documents.data.model_dump(mode="json"),
        "stored": documents.stored,
        "result": do.result.place if isinstance(do, Tokenize) else None,
        "elements": [[[task.number, _named(task)] for task in tasks] for tasks in elements],
    }


def main(place: str, stage: str, number: int) -> None:
    """Do the tasks of one element.

    Raises:
        RostraError: when one fails, or the sources are not those that the engine saw.
    """
    work = folder_at(place)
    with failures_left(work, f"element {number} on {socket.gethostname()}"):
        _do(work, stage, number)


def _do(work: Folder, stage: str, number: int) -> None:
    told = read_json(work, array_name(stage))
    if told is None:
        raise RequestError(f"{work.place}: has no {array_name(stage)}; do all nodes share it?")
    data = DataSection.model_validate(told["data"])
    documents = Documents(data, work, told["stored"])
    do: Do = Read(documents)
    if told["result"] is not None:
        do = Tokenize(documents, folder_at(told["result"]))
    tasks = list_tasks(data, BadRecords(data.on_bad_record, lambda _: None))
    mine = told["elements"][number]
    if any(n >= len(tasks) or _named(tasks[n]) != name for n, name in mine):
        raise RequestError("the sources on this node are not those where this was started")
    do_each(do, (tasks[n] for n, _ in mine))


def _named(task: Task) -> str:
    """The same for the same parts of the same sizes."""
    return digest([[part.name, part.start, part.stop, part.size] for part in task.parts])


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except RostraError as error:
        sys.exit(str(error))
