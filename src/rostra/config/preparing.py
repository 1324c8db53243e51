"""The table `data.prepare`: what does the work of preparing, and what shards are like."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rostra.config.base import Count, Section


class SparkTable(Section):
    """The Spark cluster that prepares."""

    master: str = Field(
        "local[*]", description="local[N], spark://HOST:PORT, yarn, or k8s://HOST:PORT"
    )
    settings: dict[str, str] = Field({}, description="Spark's own, e.g. spark.executor.memory")


class SlurmTable(Section):
    """The array of Slurm jobs that prepares; it needs a `data.cache` that all nodes share."""

    elements: Count = Field(16, description="of the array, at the most; they share the tasks")
    options: dict[str, str] = Field(
        {}, description="of sbatch by their long names, e.g. partition, time, cpus-per-task"
    )
    setup: tuple[str, ...] = Field((), description="lines of shell before the work, e.g. modules")
    submit: bool = Field(
        True, description="hand the array to sbatch; else only write its script, and wait"
    )
    poll_seconds: float = Field(5.0, gt=0, description="time between two looks at the array")


class PrepareTable(Section):
    """How documents become shards."""

    engine: Literal["process", "local", "spark", "slurm"] = Field(
        "local",
        description="this process, processes of this machine, a Spark cluster, or a Slurm array; "
        "all write the same shards",
    )
    workers: Count | None = Field(
        None, description="processes of the engine local; as many as cores when not given"
    )
    spark: SparkTable = SparkTable()
    slurm: SlurmTable = SlurmTable()
    task_bytes: Count = Field(
        33_554_432, description="of input, about, in a task: what is done again when it is killed"
    )
    shard_tokens: Count = Field(16_777_216, description="tokens after which a shard is closed")
