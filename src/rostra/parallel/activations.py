"""Activation checkpointing: what a layer saves for the backward pass is computed again there
(Chen et al. 2016, arXiv:1604.06174), or waits on the host meanwhile.

Modules stay what they are, and so do the names of their parameters: only `forward` of the
instance is replaced. All layers of a kind share one new function, so that `torch.compile` makes
one graph for them, and hooks of the module (those of `fully_shard`) stay outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from rostra.errors import RequestError
from rostra.models import decoder_layers
from rostra.parallel.activation_offload import Offload
from rostra.parallel.recompute_once import recompute_once

Function = Callable[..., Any]  # of a module and the arguments of its forward

# What families of transformers call the two parts of a layer.
PARTS = {
    "attention": ("self_attn", "attn", "self_attention", "attention", "linear_attn"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe"),
}

# Operations whose results are dear to compute again, or take other ranks to do so.
_KEPT = {
    "aten.mm",
    "aten.addmm",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
    "transformers.grouped_mm_fallback",
    "rostra.multiply_dequantized",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "flash_attn._flash_attn_forward",
    "flash_attn._flash_attn_varlen_forward",
    "flex_attention",
    "_c10d_functional.all_reduce",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
}
_BATCHED = {"aten.bmm", "aten.baddbmm"}


def checkpoint_activations(model: PreTrainedModel, mode: str, split: bool = False) -> None:
    """Let `model` keep less between forward and backward pass, as
    `Layout.activation_checkpointing` says; `split` where the backward pass goes through the
    graph in parts, as zero_bubble's does (see `recompute_once`):

    - `none`: layers save what their operations need.
    - `full`: a layer keeps its input and is computed again in the backward pass.
    - `every:N`: so do layers 0, N, 2N and so on; the others save all.
    - `selective:attention`, `selective:mlp`: so does that part of each layer.
    - `selective:operations`: results of matrix products and attention are kept, and what is
      cheap is computed again (Korthikanti et al. 2022, arXiv:2205.05198, chose by operation
      too).
    - `offload`: what a layer saves waits on the host (see `Offload`).

    Loss and gradients stay the same to the bit where computing twice gives the same; dropout
    does. Layers without parameters (of another pipeline stage) are passed over. The model may
    be on the meta device. Comes before compiling and sharding the layers.

    Raises: RequestError when the layers have no part of that name.
    """
    if mode == "none":
        return
    layers = list(decoder_layers(model))
    kind, _, what = mode.partition(":")
    if kind == "offload":
        offload = Offload()
        for index, layer in enumerate(_own(layers)):
            _replace(layer, partial(offload.wrap, first=index == 0))
        return
    modules = layers[:: int(what)] if kind == "every" else layers
    again: Function = recompute_once if split else _checkpoint
    if what == "operations":
        again = partial(_checkpoint, context_fn=_selective)
    wrap = partial(_recomputed, again=again)
    shared: dict[Function, Function] = {}
    for module in _own(modules):
        part = _part(module, what) if what in PARTS else module
        _replace(part, wrap, shared)


def _own(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers that this rank has."""
    return [layer for layer in layers if next(layer.parameters(), None) is not None]


def _part(layer: nn.Module, what: str) -> nn.Module:
    children = dict(layer.named_children())
    for name in PARTS[what]:
        if name in children:
            return children[name]
    raise RequestError(
        f"memory.activation_checkpointing = 'selective:{what}': a {type(layer).__name__} has no "
        f"{what} by a name known here; it has {', '.join(children) or 'no parts'}; use "
        "selective:operations, or full"
    )


def _replace(
    module: nn.Module,
    wrap: Callable[[Function], Function],
    shared: dict[Function, Function] | None = None,
) -> None:
    """Give `module` the forward that `wrap` makes of its own; the same for the same, in `shared`.

    A bound method rather than a closure over the module: a deep copy of the model then calls
    the copy.
    """
    own = module.forward
    inner: Function = getattr(own, "__func__", None) or (lambda _, *a, **k: own(*a, **k))
    made = wrap(inner) if shared is None else shared.setdefault(inner, wrap(inner))
    module.forward = MethodType(made, module)


def _recomputed(inner: Function, again: Function) -> Function:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def run(_: Tensor, *args: Any, **kwargs: Any) -> Any:
            return inner(self, *args, **kwargs)

        # checkpoint() keeps the random states of the devices of positional tensors only, and
        # transformers calls attention by keyword
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return again(run, first, *args, **kwargs)

    return forward


_checkpoint = partial(checkpoint, use_reentrant=False)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Of batched products only those are kept that are smaller than what they are made from:
    probabilities times values, but not the scores of attention, which grow with T²."""
    name = str(getattr(operation, "overloadpacket", operation))
    kept = name in _KEPT
    if name in _BATCHED:
        left, right = args[-2:]
        result = left.shape[0] * left.shape[1] * right.shape[2]
        kept = result < max(left.numel(), right.numel())
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_selective = partial(create_selective_checkpoint_contexts, _policy)
