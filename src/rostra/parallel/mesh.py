"""Where this rank stands in a layout, and the groups of ranks it talks to."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rostra.errors import RequestError
from rostra.layout import Layout

DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
DATA = ("replicate", "shard")  # along these, ranks have different samples
SUMMED = ("replicate", "shard", "context")  # along these, gradients of one parameter are summed
SHARDS = ("shard", "context")  # along these, parameters and states are cut


@dataclass
class Mesh:
    """The ranks of a layout as a grid; without a group of processes, a grid of one."""

    layout: Layout
    device: torch.device
    grid: DeviceMesh | None = None
    _flat: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Mesh:
        """Collective over all ranks. Raises RequestError when there are not as many ranks as
        the layout has."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks != layout.world_size:
            raise RequestError(
                f"parallel: this layout is for {layout.world_size} ranks "
                f"({layout.describe()}), and {ranks} were started"
            )
        if not dist.is_initialized():
            return cls(layout, device)
        sizes = tuple(getattr(layout, name) for name in DIMENSIONS)
        return cls(layout, device, init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS))

    def size(self, *names: str) -> int:
        return prod(getattr(self.layout, name) for name in names)

    def coordinate(self, *names: str) -> int:
        """This rank's place along `names` together, the last running fastest."""
        place = 0
        for name in names:
            here = 0 if self.grid is None else self.grid.get_local_rank(name)
            place = place * self.size(name) + here
        return place

    def part(self, *names: str) -> DeviceMesh:
        """The mesh along `names`, as one dimension; axes of size 1 add nothing to it."""
        assert self.grid is not None
        names = tuple(name for name in names if self.size(name) > 1) or names[:1]
        if len(names) == 1:
            return self.grid[names[0]]
        if names not in self._flat:
            self._flat[names] = self.grid[names]._flatten("_".join(names))
        return self._flat[names]

    def grid_of(self, *parts: tuple[str, ...]) -> DeviceMesh:
        """A mesh with a dimension for each of `parts`."""
        assert self.grid is not None
        names = [self.part(*part).mesh_dim_names for part in parts]
        return self.grid[tuple(name for found in names if found for name in found)]

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along `names` only; None when it is alone."""
        if self.grid is None or self.size(*names) == 1:
            return None
        return self.part(*names).get_group()

    def sum(self, values: Tensor, *names: str) -> Tensor:
        """`values` summed over the ranks along `names`, in place."""
        group = self.group(*names)
        if group is not None:
            dist.all_reduce(values, group=group)
        return values
