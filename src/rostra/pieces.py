"""Parts of named tensors: what a rank holds, writes into a checkpoint, and asks of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from rostra.errors import RequestError

INDEX = "pieces.json"

Span = tuple[int, ...]  # an offset or a size, a number for every dimension
Box = tuple[Span, Span]  # the offset and the size of a rectangle


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
        part = tensor[_within((offset, size), (0,) * len(offset))]
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


def write_pieces(path: Path, pieces: dict[str, Piece]) -> dict[str, Any]:
    """Write one safetensors file; returns what an index says of it, for `merge`. Pieces
    without an element are left out."""
    pieces = {name: piece for name, piece in pieces.items() if piece.data.numel()}
    save_file({name: piece.data.detach().contiguous() for name, piece in pieces.items()}, path)
    return {
        name: {
            "shape": list(piece.shape),
            "dtype": str(piece.data.dtype).removeprefix("torch."),
            "pieces": [[path.name, name, list(piece.offset), list(piece.data.shape)]],
        }
        for name, piece in pieces.items()
    }


def merge(indexes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The index of all files of a folder: for each tensor its shape and dtype, and the file,
    key, offset and size of its pieces.

    Raises: ValueError when two files do not speak of the same tensor.
    """
    merged: dict[str, Any] = {}
    for index in indexes:
        for name, entry in index.items():
            known = merged.setdefault(name, {**entry, "pieces": []})
            if (known["shape"], known["dtype"]) != (entry["shape"], entry["dtype"]):
                raise ValueError(f"{name}: ranks hold it in different shapes or dtypes")
            known["pieces"] += entry["pieces"]
    return merged


def index_file(path: Path) -> dict[str, Any]:
    """An index of a safetensors file that holds whole tensors."""
    with safe_open(path, "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    return {
        key: {"shape": shape, "pieces": [[path.name, key, [0] * len(shape), shape]]}
        for key, shape in shapes.items()
    }


@dataclass(frozen=True)
class _Stored:
    """A rectangle of a tensor, and where it lies."""

    file: str
    key: str
    box: Box
    start: int | None  # where it begins in a stored flat stretch; None: it is stored as it is


class PieceReader:
    """Tensors from a folder of pieces: a Reader. The files are memory-mapped, so that host
    memory holds no more than the part asked for.

    `index` is that of `merge`, by default read from the folder.
    """

    def __init__(self, folder: Path, index: dict[str, Any] | None = None) -> None:
        self._folder = folder
        self._index = json.loads((folder / INDEX).read_text()) if index is None else index
        self._files: dict[str, Any] = {}

    def names(self) -> Iterable[str]:
        return list(self._index)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._index[name]["shape"])

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """Raises: RequestError when the pieces leave a part of it out, or it lies outside."""
        shape = self.shape(name)
        if len(offset) == len(shape):
            return self._read_box(name, (tuple(offset), tuple(size)))
        parts = [
            self._read_box(name, box).flatten()
            for box in stretch_boxes(shape, offset[0], offset[0] + size[0])
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def _read_box(self, name: str, box: Box) -> Tensor:
        out: Tensor | None = None
        left = [box] if prod(box[1]) else []
        for stored in self._stored(name):
            if not left:
                break
            for wanted in left:
                shared = _overlap(wanted, stored.box)
                if shared is None:
                    continue
                part = self._load(stored, shared)
                if out is None:
                    out = torch.empty(box[1], dtype=part.dtype)
                out[_within(shared, box[0])] = part
            left = [rest for wanted in left for rest in _without(wanted, stored.box)]
        if left:
            raise RequestError(
                f"{self._folder}: {name}: nothing holds the part of size {left[0][1]} at "
                f"{left[0][0]}; this checkpoint or model is not complete"
            )
        return torch.empty(box[1]) if out is None else out

    def _stored(self, name: str) -> Iterator[_Stored]:
        shape = self.shape(name)
        for file, key, offset, size in self._index[name]["pieces"]:
            if len(offset) == len(shape):
                yield _Stored(file, key, (tuple(offset), tuple(size)), None)
                continue
            start = 0
            for box in stretch_boxes(shape, offset[0], offset[0] + size[0]):
                yield _Stored(file, key, box, start)
                start += prod(box[1])

    def _load(self, stored: _Stored, box: Box) -> Tensor:
        """The part `box` (of the whole tensor) of what is stored; the file's own memory."""
        if stored.file not in self._files:
            self._files[stored.file] = safe_open(self._folder / stored.file, "pt")
        file = self._files[stored.file]
        within = _within(box, stored.box[0])
        if stored.start is None:
            part: Tensor = (
                file.get_slice(stored.key)[within] if within else file.get_tensor(stored.key)
            )
            return part
        # Of a flat stretch: whole rows of its rectangle, and the part of them.
        rows = within[0] if within else slice(0, 1)
        row = prod(stored.box[1][1:])
        stretch = slice(stored.start + rows.start * row, stored.start + rows.stop * row)
        found: Tensor = file.get_slice(stored.key)[stretch]
        return found.view(-1, *stored.box[1][1:])[(slice(None), *within[1:])].view(box[1])


def stretch_boxes(shape: Span, start: int, stop: int) -> list[Box]:
    """The rectangles that make up the stretch `start` to `stop` of a flattened tensor, in its
    order: the rest of a row, whole rows, the beginning of a row, at every dimension."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    ends = [start, stop] if first > last else sorted({start, first * row, last * row, stop})
    boxes: list[Box] = []
    for begin, end in pairwise(ends):
        if begin % row == 0 and end % row == 0:
            rows = (begin // row, (end - begin) // row)
            boxes.append(((rows[0], *(0 for _ in shape[1:])), (rows[1], *shape[1:])))
            continue
        at = begin // row
        for offset, size in stretch_boxes(shape[1:], begin - at * row, end - at * row):
            boxes.append(((at, *offset), (1, *size)))
    return boxes


def _overlap(a: Box, b: Box) -> Box | None:
    low = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    high = [min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True)]
    size = tuple(end - start for start, end in zip(low, high, strict=True))
    return (low, size) if all(n > 0 for n in size) else None


def _without(box: Box, taken: Box) -> list[Box]:
    """Rectangles that make up `box` without `taken`."""
    shared = _overlap(box, taken)
    if shared is None:
        return [box]
    rest = []
    offset, size = list(box[0]), list(box[1])
    for dim, (start, length) in enumerate(zip(*shared, strict=True)):
        end = offset[dim] + size[dim]
        for low, high in ((offset[dim], start), (start + length, end)):
            if low < high:
                rest.append(
                    (
                        (*offset[:dim], low, *offset[dim + 1 :]),
                        (*size[:dim], high - low, *size[dim + 1 :]),
                    )
                )
        offset[dim], size[dim] = start, length
    return rest


def _within(box: Box, origin: Span) -> tuple[slice, ...]:
    """`box` as slices of a tensor that begins at `origin`."""
    return tuple(slice(x - o, x - o + n) for x, n, o in zip(*box, origin, strict=True))


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
