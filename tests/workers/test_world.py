"""Who a process is, in the environments that launchers set."""

from __future__ import annotations

import pytest

from rostra.errors import RequestError
from rostra.workers import World, describe, detect

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
}
BATCH = {  # what a script of `sbatch -N2 -n4` sees, and steps inherit
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "n[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SLURM = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
KUBEFLOW = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "2",
    "REPLICAS": "4",
    "JOBSET_NAME": "big",
    "REPLICATED_JOB_NAME": "workers",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {"JOB_COMPLETION_INDEX": "3"},
        {"PET_NPROC_PER_NODE": "4"},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        {**TRAINJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"},
    ],
)
def test_one_process(environ: dict[str, str]) -> None:
    assert detect(environ) == World()
    assert describe(detect(environ)) == "one process"


def test_torchrun_and_own_ranks() -> None:
    assert detect(TORCHRUN) == World(3, 4, 1, 2, "torchrun", "n1", 29400)
    assert detect({**TORCHRUN, "ROSTRA_LAUNCHER": "rostra"}).launcher == "rostra"
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert detect({**alone, "LOCAL_WORLD_SIZE": "1"}).size == 1
    assert describe(detect(TORCHRUN)) == "rank 3 of 4 (local rank 1 of 2), started by torchrun"


def test_torchrun_inside_a_slurm_step_counts() -> None:
    assert detect({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_slurm() -> None:
    world = detect(SLURM)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 0, 2)
    assert (world.launcher, world.address) == ("slurm", "n07")
    assert 20_000 <= world.port < 30_000
    other = detect({**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert (other.address, other.port) == (world.address, world.port)
    assert detect({**SLURM, "SLURM_JOB_ID": "72"}).port != world.port
    chosen = detect({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "1234"})
    assert (chosen.address, chosen.port) == ("other", 1234)


def test_slurm_without_the_variables_of_newer_versions() -> None:
    gone = {"SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}
    older = {name: value for name, value in SLURM.items() if name not in gone}
    world = detect({**older, "SLURM_NTASKS_PER_NODE": "2"})
    assert (world.local_size, world.address) == (2, "10.0.0.1")


def test_slurm_with_unequal_nodes() -> None:
    uneven = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_PROCID": "3"}
    assert detect(uneven).local_size == 1


def test_kubernetes() -> None:
    assert detect(KUBEFLOW) == World(1, 2, 0, 1, "kubernetes", "job-master-0", 23456)
    assert detect(TRAINJOB) == World(1, 2, 0, 1, "kubernetes", "job-node-0-0.job", 29500)
    assert detect(JOBSET) == World(2, 4, 0, 1, "kubernetes", "big-workers-0-0.big", 29500)
    indexed = {"JOB_COMPLETION_INDEX": "1", "REPLICAS": "2", "MASTER_ADDR": "job-0.service"}
    assert detect(indexed) == World(1, 2, 0, 1, "kubernetes", "job-0.service", 29500)


def test_open_mpi() -> None:
    world = detect({**MPI, "PMIX_NAMESPACE": "prterun-host-17@1"})
    assert world == World(1, 2, 1, 2, "mpi", "127.0.0.1", world.port)
    assert 20_000 <= world.port < 30_000
    hosts = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert detect({**hosts, "MASTER_ADDR": "n1"}).address == "n1"
    with pytest.raises(RequestError, match="-x MASTER_ADDR"):
        detect(hosts)


@pytest.mark.parametrize("missing", list(TORCHRUN))
def test_half_of_torchrun_names_what_lacks(missing: str) -> None:
    half = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(RequestError, match=f"{missing} is not set"):
        detect(half)


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        (SLURM, "SLURM_LOCALID"),
        (SLURM, "SLURM_JOB_ID"),
        (SLURM, "SLURM_NODEID"),
        (TRAINJOB, "PET_MASTER_ADDR"),
        (JOBSET, "REPLICAS"),
        (JOBSET, "REPLICATED_JOB_NAME"),
        (MPI, "OMPI_COMM_WORLD_RANK"),
        (MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ],
)
def test_half_of_others_names_what_lacks(environ: dict[str, str], missing: str) -> None:
    half = {name: value for name, value in environ.items() if name != missing}
    with pytest.raises(RequestError, match=f"{missing} is not set"):
        detect(half)


def test_nonsense_is_refused() -> None:
    with pytest.raises(RequestError, match="RANK='one'"):
        detect({**TORCHRUN, "RANK": "one"})
    with pytest.raises(RequestError, match="rank 4 of 4"):
        detect({**TORCHRUN, "RANK": "4"})
    with pytest.raises(RequestError, match="PET_NPROC_PER_NODE=8"):
        detect({**KUBEFLOW, "PET_NPROC_PER_NODE": "8"})
