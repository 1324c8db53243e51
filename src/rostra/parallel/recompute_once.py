"""Activation checkpointing for a backward pass in two parts, as zero_bubble's is.

`torch.utils.checkpoint` computes again in every walk through the graph, and zero_bubble walks
it once for the inputs and once for each group of weights: ten times for a layer. Here what was
computed again stays until the last walk, as long as autograd keeps what it saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.random import fork_rng
from torch.utils.checkpoint import get_device_states, set_device_states


class _Saved:
    """What stands in the graph for a saved tensor, and holds it from the first walk on."""

    __slots__ = ("__weakref__", "again", "like", "tensor")

    def __init__(self, again: Callable[[], None], like: Tensor) -> None:
        self.again = again
        self.like = _looks(like)
        self.tensor: Tensor | None = None


class _AllSaved(Exception):
    """Ends a recomputation: nothing after the last saved tensor is asked for."""


def recompute_once(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`run(*args, **kwargs)`, of which the arguments stay, and what autograd saves is computed
    again when first asked for. Random numbers and autocast are then as they were.

    Raises: RuntimeError in the backward pass when `run` saves something else the second time.
    """
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    places: list[weakref.ref[_Saved]] = []
    again = partial(_compute_again, run, args, kwargs, places, _now(args))

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(again, tensor)
        places.append(weakref.ref(saved))
        return saved

    with saved_tensors_hooks(pack, _unpack):
        return run(*args, **kwargs)


def _unpack(saved: _Saved) -> Tensor:
    if saved.tensor is None:
        saved.again()
    if saved.tensor is None:
        raise RuntimeError("a layer saved fewer tensors when it was computed again")
    return saved.tensor


def _looks(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _compute_again(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    places: list[weakref.ref[_Saved]],
    as_then: Callable[[], AbstractContextManager[None]],
) -> None:
    number = 0

    def pack(tensor: Tensor) -> None:
        nonlocal number
        if (saved := places[number]()) is not None:  # some are given back already
            if _looks(tensor) != saved.like:
                raise RuntimeError(
                    f"a layer saved {_looks(tensor)} in the place of {saved.like} when it was "
                    "computed again"
                )
            saved.tensor = tensor.detach()
        number += 1
        if number == len(places):
            raise _AllSaved

    def unpack(_: None) -> Tensor:
        raise AssertionError("this graph is never walked")

    detached = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args
    ]
    try:
        with as_then(), torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            run(*detached, **kwargs)
    except _AllSaved:
        pass


def _now(args: tuple[Any, ...]) -> Callable[[], AbstractContextManager[None]]:
    """Of random numbers and autocast what is set now: to be set again by the context returned."""
    kinds = {"cpu", *(x.device.type for x in args if isinstance(x, Tensor))}
    casts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    ]
    cached, random = torch.is_autocast_cache_enabled(), torch.get_rng_state()
    # as in torch.utils.checkpoint: asking a GPU would start it, where nothing runs on one
    devices, states = get_device_states(*args) if torch.cuda.is_initialized() else ([], [])

    @contextmanager
    def as_then() -> Iterator[None]:
        with fork_rng(devices), ExitStack() as stack:
            torch.set_rng_state(random)
            set_device_states(devices, states)
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            yield

    return as_then
