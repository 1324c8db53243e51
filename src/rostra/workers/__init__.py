"""Starting ranks and bringing them together: who am I among how many, the group of all ranks,
and a run's own local ranks under PyTorch's elastic agent."""

from __future__ import annotations

from rostra.workers.agree import (
    on_any_rank,
    on_every_rank,
    on_first_rank,
    this_rank,
    world_size,
)
from rostra.workers.group import joined
from rostra.workers.hosts import expand_hosts
from rostra.workers.launch import start
from rostra.workers.world import Launcher, World, describe, detect, free_port

__all__ = [
    "Launcher",
    "World",
    "describe",
    "detect",
    "expand_hosts",
    "free_port",
    "joined",
    "on_any_rank",
    "on_every_rank",
    "on_first_rank",
    "start",
    "this_rank",
    "world_size",
]
