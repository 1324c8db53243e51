"""What does the work of preparing: this process, others of this machine, Spark, or Slurm.

An engine is given tasks and what to do with them (`rostra.data.tasks`); it decides where and
in which order, and nothing else: all engines write the same bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from rostra.config.data import DataSection
from rostra.data.engines.local import LocalEngine
from rostra.data.engines.process import ProcessEngine
from rostra.data.tasks import Engine

__all__ = ["open_engine"]


@contextlib.contextmanager
def open_engine(data: DataSection, size: int, say: Callable[[str], None]) -> Iterator[Engine]:
    """The engine of `data.prepare.engine`, for all stages; too little work for several processes
    is done here.

    Args:
        size: of all input, in bytes.

    Raises:
        RequestError: when it cannot be had.
    """
    table = data.prepare
    match table.engine:
        case "spark":
            from rostra.data.engines.spark import SparkEngine, spark_session

            with spark_session(table.spark) as session:
                yield SparkEngine(session)
        case "slurm":
            from rostra.data.engines.slurm import SlurmEngine

            yield SlurmEngine(table.slurm, say)
        case "local":
            workers = table.workers or len(os.sched_getaffinity(0))
            workers = min(workers, -(-size // table.task_bytes))
            yield LocalEngine(workers) if workers > 1 else ProcessEngine()
        case "process":
            yield ProcessEngine()
