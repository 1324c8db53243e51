"""A process of the engine `local`: hears what to do and tasks, says when they are done."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from rostra.data.tasks import Do, Task
from rostra.errors import RostraError


def main(connection: Connection) -> None:
    """Do tasks until nobody sends more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started us
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    try:
        do: Do = connection.recv()
        while True:
            task: Task = connection.recv()
            try:
                do(task, lambda *done: connection.send(done))
            except (RostraError, OSError) as error:
                connection.send(error)
            except Exception:
                problem = f"preparing {task.reader.key} failed:\n{traceback.format_exc()}"
                connection.send(RostraError(problem))
            else:
                connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with(parent: int) -> None:
    """A worker whose starter was killed is not to write where the next one works."""
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
