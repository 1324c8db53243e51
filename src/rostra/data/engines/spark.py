"""The engine `spark`: tasks as the partitions of a Spark job, on any cluster by its master URL.

Executors need Rostra installed, the sources in reach, and `data.cache` on a file system or store
that they share with the driver: documents and shards never pass through Spark.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Sequence

from rostra.config.preparing import SparkTable
from rostra.data.engines.afar import complete_afar, do_each, forget_failure
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

    def __init__(self, table: SparkTable) -> None:
        self._table = table

    def run(self, tasks: Sequence[Task], do: Do, tell: Tell) -> Generator[Task, None, None]:
        if not tasks:
            return
        forget_failure(do)
        session = self._session()
        context = session.sparkContext
        slices = min(len(tasks), ROUNDS * context.defaultParallelism)
        work = context.parallelize(list(tasks), slices)
        problems: list[str] = []

        def collect() -> None:
            try:
                work.foreachPartition(lambda own: do_each(do, own))
            except Exception as error:  # of Java, with both stacks in its text
                problems.append(f"the Spark job failed: {str(error).strip()}")

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()

        def ended() -> str | None:
            if thread.is_alive():
                return None
            return problems[0] if problems else "the Spark job has ended"

        try:
            yield from complete_afar(tasks, do, tell, ended, SECONDS)
        finally:
            context.cancelAllJobs()
            thread.join(10)
            session.stop()

    def _session(self):  # type: ignore[no-untyped-def]  # pyspark may not be there
        try:
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise RequestError(
                "data.prepare.engine: spark needs PySpark and Java 17 or later. Run: "
                "pip install 'rostra[spark]'"
            ) from error
        # Workers of a local master are of this interpreter; a cluster's own settings win.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        settings = {
            "spark.ui.showConsoleProgress": "false",
            **{f"spark.executorEnv.{name}": value for name, value in ONE_CORE.items()},
            **self._table.settings,
        }
        builder = SparkSession.builder.appName("rostra prepare").master(self._table.master)
        for key, value in settings.items():
            builder = builder.config(key, value)
        try:
            return builder.getOrCreate()
        except Exception as error:  # Java is missing, or the master does not answer
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            raise RequestError(
                f"data.prepare.spark.master: no session with {self._table.master} ({reason})"
            ) from error
