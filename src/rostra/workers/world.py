"""Who this process is among how many, from the environment that a launcher set."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from rostra.errors import RequestError
from rostra.workers.hosts import expand_counts, expand_hosts

Launcher = Literal["torchrun", "slurm", "kubernetes", "mpi", "rostra", "none"]

PORT = 29500  # PyTorch's own default for the port where ranks meet


@dataclass(frozen=True)
class World:
    """One process among `size`; on its own host it is `local_rank` of `local_size`.

    All ranks meet at `address`:`port`, where rank 0 (or its launcher's agent) listens.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "none"
    address: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
        ):
            if not 0 <= rank < size:
                raise RequestError(
                    f"{self.launcher} says that this process is {name} {rank} of {size}: ranks go "
                    f"from 0 to {size - 1}. Correct the environment, or unset it to train with "
                    "one process."
                )


def describe(world: World) -> str:
    """One line for a person: `rank 3 of 8 (local rank 1 of 2), started by slurm`."""
    if world.launcher == "none":
        return "one process"
    local = f"local rank {world.local_rank} of {world.local_size}"
    return f"rank {world.rank} of {world.size} ({local}), started by {world.launcher}"


def free_port() -> int:
    """A port of this machine that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def detect(environ: Mapping[str, str]) -> World:
    """This process's place among the ranks that a launcher started; one of one without any.

    The innermost launcher counts: torchrun or Rostra's own, Open MPI's mpirun, Slurm's srun,
    then the pods of Kubernetes. MASTER_ADDR and MASTER_PORT replace the address that a
    launcher implies. Raises RequestError for an environment that is set in part.
    """
    for found in (_torchrun, _mpi, _slurm, _kubernetes):
        world = found(environ)
        if world is not None:
            return world
    return World()


def _torchrun(environ: Mapping[str, str]) -> World | None:
    """RANK and its kind: torchrun, Rostra's own ranks, or a pod of Kubeflow's PyTorchJob."""
    if not {"RANK", "WORLD_SIZE"} & set(environ):  # LOCAL_RANK alone, DeepSpeed sets
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    address = ("127.0.0.1", 0)
    if size > 1:
        address = (_text(environ, "MASTER_ADDR"), _number(environ, "MASTER_PORT"))
    pod = "KUBERNETES_SERVICE_HOST" in environ or "PET_NNODES" in environ
    if pod and "LOCAL_RANK" not in environ:
        _refuse_many_in_pod(environ)
        return World(rank, size, 0, 1, "kubernetes", *address)
    local = (_number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE"))
    own = environ.get("ROSTRA_LAUNCHER") == "rostra"
    return World(rank, size, *local, "rostra" if own else "torchrun", *address)


def _mpi(environ: Mapping[str, str]) -> World | None:
    """Open MPI's mpirun. It tells no address, so ranks on several hosts need MASTER_ADDR."""
    if "OMPI_COMM_WORLD_SIZE" not in environ and "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    rank, size, local_rank, local_size = (
        _number(environ, f"OMPI_COMM_WORLD_{name}")
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    if local_size < size and "MASTER_ADDR" not in environ:
        raise RequestError(
            f"mpirun started {size} ranks on several hosts and MASTER_ADDR is not set: start "
            "with mpirun -x MASTER_ADDR=HOST, the host of rank 0"
        )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    port = _port_of(job) if job else PORT
    address = _address(environ, "127.0.0.1", port)
    return World(rank, size, local_rank, local_size, "mpi", *address)


def _slurm(environ: Mapping[str, str]) -> World | None:
    """A task of `srun` among several. A batch script has SLURM_PROCID too, with SLURM_NTASKS
    of the whole allocation, but runs once: only a step has SLURM_STEP_ID."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    size = _number(environ, name)
    if size == 1:
        return None
    if "SLURM_STEP_TASKS_PER_NODE" in environ:
        counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
        node = _number(environ, "SLURM_NODEID") if len(counts) > 1 else 0
        local_size = counts[min(node, len(counts) - 1)]
    else:
        local_size = _number(environ, "SLURM_NTASKS_PER_NODE")
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    port = _port_of(f"{_text(environ, 'SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}")
    address = _address(environ, _first_host(environ), port)
    return World(rank, size, local_rank, local_size, "slurm", *address)


def _first_host(environ: Mapping[str, str]) -> str:
    """The host of task 0. Where srun itself ran is the last resort: it may be a login node."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if name in environ:
            return expand_hosts(environ[name])[0]
    return _text(environ, "SLURM_LAUNCH_NODE_IPADDR")


def _kubernetes(environ: Mapping[str, str]) -> World | None:
    """One rank a pod: Kubeflow's TrainJob (PET_*), or an indexed Job or JobSet.

    Kubernetes tells a pod of an indexed Job its index only; the manifest gives REPLICAS, the
    number of pods, and either MASTER_ADDR or, as JobSet names its pods and their headless
    service, JOBSET_NAME and REPLICATED_JOB_NAME.
    """
    if "PET_NODE_RANK" in environ and "PET_NNODES" in environ:
        size, rank = _number(environ, "PET_NNODES"), _number(environ, "PET_NODE_RANK")
        _refuse_many_in_pod(environ)
        if size == 1:
            return None
        port = _number(environ, "PET_MASTER_PORT")
        return World(rank, size, 0, 1, "kubernetes", _text(environ, "PET_MASTER_ADDR"), port)
    together = {"REPLICAS", "JOBSET_NAME", "MASTER_ADDR"} & set(environ)
    if "JOB_COMPLETION_INDEX" not in environ or not together:
        return None  # pods of an indexed Job may well have nothing to do with each other
    rank, size = _number(environ, "JOB_COMPLETION_INDEX"), _number(environ, "REPLICAS")
    if size == 1:
        return None
    host = environ.get("MASTER_ADDR")
    if host is None:
        jobset, job = _text(environ, "JOBSET_NAME"), _text(environ, "REPLICATED_JOB_NAME")
        host = f"{jobset}-{job}-0-0.{jobset}"
    return World(rank, size, 0, 1, "kubernetes", *_address(environ, host, PORT))


def _refuse_many_in_pod(environ: Mapping[str, str]) -> None:
    count = environ.get("PET_NPROC_PER_NODE", "1")
    if count.isdigit() and int(count) > 1:
        raise RequestError(
            f"PET_NPROC_PER_NODE={count} asks for several ranks in this pod, and one was started: "
            "let the pod's command be torchrun -m rostra.cli, or set one process per node"
        )


def _address(environ: Mapping[str, str], host: str, port: int) -> tuple[str, int]:
    """Where ranks meet: what the user set, else what the launcher implies."""
    chosen = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else port
    return environ.get("MASTER_ADDR", host), chosen


def _port_of(job: str) -> int:
    """A port that all ranks of a job agree on without talking, below Linux's ephemeral ones."""
    return 20_000 + crc32(job.encode()) % 10_000


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise RequestError(
            f"the environment says that this process is one of many, but {name} is not set: set "
            "it, or unset the launcher's other variables to train with one process"
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.isdigit():
        raise RequestError(f"{name}={text!r} in the environment is not a number")
    return int(text)
