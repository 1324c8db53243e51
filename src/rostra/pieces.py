"""Parts of named tensors: what a rank holds, writes into a checkpoint, and asks of one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """`data` is the part of a tensor of `shape` that begins at `offset`.

    `offset` has a number for every dimension, and `data` as many dimensions; or one number,
    and `data` is a stretch of the flattened tensor from there on.
    """

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return tuple(self.data.shape) == self.shape


class Reader(Protocol):
    """Where weights and states come from: a checkpoint, a model's folder, a seed."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor. Raises KeyError when there is none of this name."""
        ...

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """The part of `size` at `offset`, on the CPU; both as in `Piece`."""
        ...
