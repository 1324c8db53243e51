"""Tensors out of a folder of pieces, whoever wrote which part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rostra.errors import RequestError
from rostra.pieces.boxes import Box, overlap, slices, stretch_boxes, without

INDEX = "pieces.json"


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
                shared = overlap(wanted, stored.box)
                if shared is None:
                    continue
                part = self._load(stored, shared)
                if out is None:
                    out = torch.empty(box[1], dtype=part.dtype)
                out[slices(shared, box[0])] = part
            left = [rest for wanted in left for rest in without(wanted, stored.box)]
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
        within = slices(box, stored.box[0])
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
