"""What a rank holds of each parameter that trains, and what the optimizer is given of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rostra.optim import Part
from rostra.parallel.mesh import Mesh
from rostra.pieces import local_piece


@dataclass
class Held:
    """A part of the parameter `name`, as the optimizer sees it: `value`, its `grad` included.

    `shape` is that of the whole parameter and `offset` where the part begins, as in
    `rostra.pieces.Piece`; `copies` is the number of ranks of a stage that hold the same part;
    `written` tells whether this rank writes it into checkpoints.
    """

    name: str
    value: nn.Parameter
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    copies: int
    written: bool
    counted: bool = True  # in norms; of tied embeddings in two stages, one is
    parts: int = 1  # into how many the parameter is cut

    @property
    def part(self) -> Part:
        return Part(self.shape, self.offset, self.parts)


class Gradients(Protocol):
    """Who brings the gradients of all ranks together, for what this rank updates."""

    held: list[Held]

    @property
    def masters(self) -> list[Held]:
        """Those whose value is more exact than the model's weight."""
        ...

    def so_far(self, parameter: nn.Parameter) -> Tensor | None:
        """What micro batches have given `parameter` on this rank, local, to be changed in
        place; between the last backward pass and `collect`."""
        ...

    def before(self, last: bool) -> None:
        """Before the backward pass of a micro batch; `last` of the step or not."""
        ...

    def collect(self) -> None:
        """After the last: the sums over all ranks are in `held[i].value.grad`."""
        ...

    def publish(self) -> None:
        """After the optimizer's step: bring what it changed into the model."""
        ...

    def clear(self) -> None: ...


def local(tensor: Tensor) -> Tensor:
    """This rank's values, without a copy."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def parts_of(tensor: Tensor) -> int:
    """Into how many parts a DTensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in placed if not placement.is_replicate())


def first_of_copies(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether this rank is the first of those that hold the same part of `tensor`."""
    known: tuple[str, ...] = ()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        known = tuple(part for name in names for part in name.split("_"))
        here = tensor.device_mesh.get_coordinate() or ()
        placed = zip(here, tensor.placements, strict=True)
        if any(at and placement.is_replicate() for at, placement in placed):
            return False
    axes = ("replicate", "shard", "context", "tensor")
    return mesh.coordinate(*(name for name in axes if name not in known)) == 0


def whole_part(name: str, parameter: nn.Parameter, mesh: Mesh) -> Held:
    """All that this rank holds of `parameter`, given to the optimizer as a plain tensor."""
    piece = local_piece(parameter)
    parts = parts_of(parameter)
    copies = mesh.layout.world_size // mesh.layout.pipeline // parts
    return Held(
        name,
        nn.Parameter(local(parameter), parameter.requires_grad),
        piece.shape,
        piece.offset,
        copies,
        first_of_copies(parameter, mesh),
        parts=parts,
    )


def gradient_norm(held: Sequence[Held], mesh: Mesh) -> float:
    """The Euclidean norm of all gradients of the whole model, in float32.

    Every part counts once, however many ranks hold it: the squares are divided by the number
    of copies and summed over all ranks.
    """
    device = mesh.device
    squares = torch.zeros((), dtype=torch.float32, device=device)
    having = [h for h in held if h.counted and h.value.grad is not None and h.value.grad.numel()]
    if having:
        grads = [h.value.grad for h in having if h.value.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        copies = torch.tensor([float(h.copies) for h in having], device=norms.device)
        squares = (norms.square() / copies).sum().to(device)
    return float(mesh.sum(squares, "pipeline", "replicate", "shard", "context", "tensor").sqrt())
