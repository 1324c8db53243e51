"""Parts of named tensors: what a rank holds, and what it asks of whatever has the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from rostra.pieces.boxes import Span, slices


@dataclass(frozen=True)
class Piece:
    """`data` is the part of a tensor of `shape` that begins at `offset`.

    `offset` has a number for every dimension, and `data` as many dimensions; or one number,
    and `data` is a stretch of the flattened tensor from there on.
    """

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Reader(Protocol):
    """Where weights and states come from: a checkpoint, a model's folder, a seed."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor. Raises KeyError when there is none of this name."""
        ...

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """The part of `size` at `offset`, both as in `Piece`; on the CPU, in memory of its
        own."""
        ...


def local_piece(tensor: Tensor) -> Piece:
    """What this rank holds of `tensor`; the piece's data shares the tensor's memory.

    A plain tensor is whole. Of a DTensor split several times along one dimension, FSDP over
    tensor parallelism has split the tensor ranks' rows again, although its mesh names them
    last (torch says so by `_StridedShard`): what a rank holds is one rectangle all the same.

    Raises: ValueError when it is none, or holds an unreduced sum.
    """
    if not isinstance(tensor, DTensor):
        return Piece(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    with torch.no_grad():
        local = tensor.to_local()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank asks only for tensors that it holds"
    offset, size = [0] * tensor.dim(), list(tensor.shape)
    for axis, dim, parts in _splits(tensor):
        step = -(-size[dim] // parts)  # as torch.chunk splits
        start = min(size[dim], step * coordinate[axis])
        size[dim] = min(step, size[dim] - start)
        offset[dim] += start
    if tuple(local.shape) != tuple(size):
        raise ValueError(f"a rank's part of {tensor.placements} is not one rectangle")
    return Piece(local, tuple(tensor.shape), tuple(offset))


def _splits(tensor: DTensor) -> list[tuple[int, int, int]]:
    """Mesh axis, tensor dimension and number of parts of each split, in the order in which
    they were made: plain ones from the left, then strided ones from the right."""
    mesh, plain, strided = tensor.device_mesh, [], []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise ValueError("an unreduced sum has no pieces")
        if isinstance(placement, Replicate):
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        split = (axis, dim, mesh.size(axis))
        interleaved = getattr(placement, "split_factor", 1)
        if interleaved == 1:
            plain.append(split)
            continue
        later = [
            mesh.size(other)
            for other, x in enumerate(tensor.placements)
            if other > axis and getattr(x, "dim", None) == dim
        ]
        if interleaved != prod(later):
            raise ValueError(f"a rank's part of {tensor.placements} is not one rectangle")
        strided.append(split)
    return [*plain, *reversed(strided)]


@torch.no_grad()
def fill(tensor: Tensor, reader: Reader, name: str) -> None:
    """Copy this rank's part of `name` into `tensor`, a plain one or a DTensor, in its dtype.

    Raises: KeyError when the reader has no such tensor, ValueError when it has another shape.
    """
    piece = local_piece(tensor)
    if (shape := tuple(reader.shape(name))) != piece.shape:
        raise ValueError(f"{name}: has the shape {shape} there, and {piece.shape} here")
    if piece.data.numel():
        piece.data.copy_(reader.read(name, piece.offset, tuple(piece.data.shape)))


def cut(tensor: Tensor, offset: Span, size: Span) -> Tensor:
    """A copy, on the CPU, of the part of a whole tensor of `size` at `offset`."""
    if len(offset) == tensor.dim():
        part = tensor[slices((offset, size), (0,) * len(offset))]
    else:
        part = tensor.flatten()[offset[0] : offset[0] + size[0]]
    return part.to("cpu", copy=True)


def read_whole(reader: Reader, name: str) -> Tensor:
    """All of a tensor. Raises KeyError when there is none of this name."""
    shape = reader.shape(name)
    return reader.read(name, (0,) * len(shape), shape)


class Tensors:
    """A Reader of tensors that are whole and at hand."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def names(self) -> Iterable[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return cut(self._tensors[name], offset, size)


class Below:
    """What `reader` has under `prefix/`, by the names after it."""

    def __init__(self, prefix: str, reader: Reader) -> None:
        self._prefix, self._reader = f"{prefix}/", reader

    def names(self) -> Iterable[str]:
        begins = self._prefix
        return [n.removeprefix(begins) for n in self._reader.names() if n.startswith(begins)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(self._prefix + name)

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return self._reader.read(self._prefix + name, offset, size)
