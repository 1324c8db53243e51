"""The engine `spark`: tasks as the partitions of a Spark job, on any cluster by its master URL.

Executors need Rostra installed, the sources in reach, and `data.cache` on a file system or store
that they share with the driver: documents and shards never pass through Spark.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from rostra.config.preparing import SparkTable
from rostra.data.engines.afar import (
    complete_afar,
    do_each,
    failures_left,
    forget_failure,
    incomplete,
)
from rostra.data.tasks import Do, Task, Tell
from rostra.errors import RequestError

ONE_CORE = {
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ROUNDS = 4  # partitions a core: the tokenizer is loaded once in each, and the last ends sooner
SECONDS = 0.5  # between two looks for what is complete


class SparkEngine:
    """Does tasks on a Spark cluster."""

    def __init__(self, session: Any) -> None:
        self._context = session.sparkContext

    def run(self, tasks: Sequence[Task], do: Do, tell: Tell) -> Generator[Task, None, None]:
        if not tasks:
            return
        forget_failure(do)
        slices = min(len(tasks), ROUNDS * self._context.defaultParallelism)
        work = self._context.parallelize(list(tasks), slices)
        problems: list[str] = []

        def collect() -> None:
            try:
                work.foreachPartition(lambda own: _do(do, own))
            except Exception as error:  # of Java, with both stacks in its text
                problems.append(f"the Spark job failed: {str(error).strip()}")

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()

        def ended() -> str | None:
            if thread.is_alive():
                return None
            return problems[0] if problems else "the Spark job has ended"

        try:
            why = yield from complete_afar(tasks, do, tell, ended, SECONDS)
        finally:
            self._context.cancelAllJobs()
            thread.join(10)
        if why:
            raise incomplete(why, do, tasks)


def _do(do: Do, tasks: Iterable[Task]) -> None:
    """On an executor."""
    with failures_left(do.work, f"Spark's executor on {socket.gethostname()}"):
        do_each(do, tasks)


@contextlib.contextmanager
def spark_session(table: SparkTable) -> Iterator[Any]:
    """A session on the cluster, ended afterwards; or the one that the process has already.

    Raises:
        RequestError: when there is no PySpark, no Java, or no answer.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise RequestError(
            "data.prepare.engine: spark needs PySpark and Java 17 or later. Run: "
            "pip install 'rostra[spark]'"
        ) from error
    if (session := SparkSession.getActiveSession()) is not None:
        yield session
        return
    # Workers of a local master are of this interpreter; a cluster's own settings win.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.ui.showConsoleProgress": "false",
        **{f"spark.executorEnv.{name}": value for name, value in ONE_CORE.items()},
        **table.settings,
    }
    builder = SparkSession.builder.appName("rostra prepare").master(table.master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except Exception as error:  # Java is missing, or the master does not answer
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
        raise RequestError(
            f"data.prepare.spark.master: no session with {table.master} ({reason})"
        ) from error
    try:
        yield session
    finally:
        session.stop()
