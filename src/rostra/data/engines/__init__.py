"""What does the work of preparing: this process, others of this machine, Spark, or Slurm.

An engine is given tasks and what to do with them (`rostra.data.tasks`); it decides where and
in which order, and nothing else: all engines write the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from rostra.config.data import DataSection
from rostra.data.engines.local import LocalEngine
from rostra.data.engines.process import ProcessEngine
from rostra.data.tasks import Engine

__all__ = ["make_engine"]


def make_engine(data: DataSection, bytes_to_do: int, say: Callable[[str], None]) -> Engine:
    """The engine of `data.prepare.engine`; too little work for several processes is done here."""
    table = data.prepare
    match table.engine:
        case "spark":
            from rostra.data.engines.spark import SparkEngine

            return SparkEngine(table.spark)
        case "slurm":
            from rostra.data.engines.slurm import SlurmEngine

            return SlurmEngine(table.slurm, say)
        case "local":
            workers = table.workers or len(os.sched_getaffinity(0))
            workers = min(workers, -(-bytes_to_do // table.task_bytes))
            if workers > 1:
                return LocalEngine(workers)
    return ProcessEngine()
