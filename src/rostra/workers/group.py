"""The group of all ranks, from the meeting to the parting."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from rostra.errors import RequestError, RostraError, Stopped
from rostra.workers.fate import FAILED, note
from rostra.workers.world import World

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_PARTING = 10.0  # seconds that leaving a broken group may take


@contextlib.contextmanager
def joined(
    world: World,
    device: torch.device,
    meeting_seconds: float = 1800.0,
    timeout_seconds: float = 86400.0,
) -> Iterator[torch.device]:
    """Be one of `world`'s ranks: torch.distributed is initialised inside, and gone after.

    Yields the device of this rank: `device` on the CPU, the GPU of its local rank otherwise.
    The backend is gloo on the CPU, and gloo for tensors of the CPU beside NCCL on GPUs. Ranks
    that share a host's CPU share its cores. The meeting fails after `meeting_seconds`; a
    collective only after `timeout_seconds`, as ranks wait in one while rank 0 prepares data or
    writes a model (a rank that dies is noticed at once). Raises RequestError when the ranks do
    not come together in time, naming the address and how many came, and for more ranks on a
    host than it has GPUs.
    """
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    if device.type == "cuda":
        device = _gpu(world)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    meeting, timeout = timedelta(seconds=meeting_seconds), timedelta(seconds=timeout_seconds)
    with _exported(world), _share_of_cores(world.local_size):
        store = HashStore() if world.size == 1 else _meet(world, meeting)
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
        try:
            yield device
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, Stopped):
                # Before others fail because this rank leaves.
                note(FAILED, error.exit_code if isinstance(error, RostraError) else 1)
            _leave_broken()
            raise
        leave()


def leave() -> None:
    """End the group, and what DTensor remembers of how to redistribute over it: the next group
    has other names. What still holds a group keeps its threads running: it goes first."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    gc.collect()


def _gpu(world: World) -> torch.device:
    """The GPU of this rank. Slurm and MPI may show each of them its own alone."""
    import torch

    count = torch.cuda.device_count()
    index = 0 if count == 1 and world.launcher in ("slurm", "mpi") else world.local_rank
    if index >= count:
        raise RequestError(
            f"{world.local_size} ranks were started on this host, which has {count} GPUs; start "
            f"{count}, or set CUDA_VISIBLE_DEVICES= to try the layout on the CPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _meet(world: World, timeout: timedelta) -> Store:
    """Wait for all ranks at the world's address; a store of their own for the group."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    # The elastic agent listens itself, and goes on when ranks meet a second time.
    listens = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"{world.address}:{world.port}"
    seconds = f"{timeout.total_seconds():g} s"
    try:
        store = TCPStore(
            world.address,
            world.port,
            is_master=listens,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        count = store.add("rostra/ranks", 1)
    except RuntimeError as error:
        does = "listen" if listens else "reach rank 0"
        raise RequestError(
            f"rank {world.rank} of {world.size} could not {does} at {where} within {seconds}: "
            f"{_first_line(error)}. MASTER_ADDR and MASTER_PORT must name the host of rank 0, "
            "and a free port there that all hosts can reach."
        ) from error
    meeting = (count - 1) // world.size
    everyone = f"rostra/meeting/{meeting}"
    try:
        if count % world.size == 0:
            store.set(everyone, "here")
        store.wait([everyone], timeout)
    except RuntimeError as error:
        raise RequestError(
            f"{_came(store, world, meeting)} of {world.size} ranks came to {where} within "
            f"{seconds}. Start all {world.size} ranks with the same address, and look at the "
            "output of those that are missing."
        ) from error
    return PrefixStore(f"rostra/{meeting}", store)


def _came(store: Store, world: World, meeting: int) -> str:
    try:
        return f"only {store.add('rostra/ranks', 0) - meeting * world.size}"
    except RuntimeError:  # the one who listened has gone
        return "not all"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(". ") if str(error) else type(error).__name__


def _leave_broken() -> None:
    """Leave when other ranks may be gone, for which an orderly end could wait for ever."""
    import torch.distributed as dist

    if dist.is_initialized():
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(_PARTING)


@contextlib.contextmanager
def _exported(world: World) -> Iterator[None]:
    """torchrun's variables whatever the launcher, for libraries that read them."""
    if world.launcher == "none":
        yield
        return
    values = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "MASTER_ADDR": world.address,
        "MASTER_PORT": str(world.port),
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _share_of_cores(local_size: int) -> Iterator[None]:
    """At most this rank's share of threads: two pools on the same cores spin against each other."""
    import torch

    before = torch.get_num_threads()
    if local_size > 1:
        torch.set_num_threads(min(before, max(1, cores() // local_size)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
