"""16-bit products of weights that are there only while they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_CAST, _TRANSPOSED = "ToCopyBackward0", ("TBackward0", "TransposeBackward0")  # autograd's names


class _Kept(NamedTuple):
    """A saved tensor; autograd does not look whether one that a hook saw was written to since."""

    tensor: Tensor
    version: int


class _Cast(NamedTuple):
    """From what a saved tensor is made once more."""

    parameter: nn.Parameter
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


@contextmanager
def cast_at_each_use(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast to `dtype` that keeps no copy of a parameter: the backward pass casts it again.
    (The copy of a part of one, of a single expert say, stays.)

    Weights that are gathered layer by layer would else stay in 16 bits from their forward pass
    on: autocast has its copies to the end of it, and autograd to that of the backward pass.
    The parameter must be there again when its gradient is computed, as under ZeRO-3.
    """
    autocast = torch.autocast(device, dtype, cache_enabled=False)
    with autocast, saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(tensor: Tensor) -> _Kept | _Cast:
    node: Any = tensor.grad_fn
    if node is not None and node.name() in _TRANSPOSED:
        node = node.next_functions[0][0]
    if node is None or node.name() != _CAST:
        return _Kept(tensor.detach(), tensor._version)
    parameter = getattr(node.next_functions[0][0], "variable", None)
    if not isinstance(parameter, nn.Parameter):
        return _Kept(tensor.detach(), tensor._version)
    return _Cast(parameter, tensor.dtype, tensor.shape, tensor.stride())


def _unpack(saved: _Kept | _Cast) -> Tensor:
    if isinstance(saved, _Kept):
        if saved.tensor._version != saved.version:
            raise RuntimeError("a tensor that the backward pass needs was changed in place")
        return saved.tensor
    return saved.parameter.detach().to(saved.dtype).as_strided(saved.size, saved.stride)
