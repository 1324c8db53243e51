"""Prefix tuning (Li & Liang 2021, arXiv:2101.00190): every layer's attention finds learned keys
and values before each example.

The virtual tokens are positions of the sample (see `prompt.py`) whose keys and values are
replaced in each layer, after the rotary embedding: learned keys are not rotated, and the
example's own positions begin after them, as in peft. What the layers compute at these positions
themselves is seen by no other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from rostra.adapt.prompt import hide_virtual, virtual_index
from rostra.errors import RequestError
from rostra.models import decoder_layers

PREFIX = "prefix"  # name of the module in each attention
VIRTUAL = "virtual_ids"  # the argument under which the model hands the ids to its layers

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


class Prefix(nn.Module):
    """The learned keys and values of one layer, `weight` [key/value heads, 2, virtual tokens,
    head size]: heads come first, so that they are split as the projections are."""

    def __init__(self, heads: int, count: int, size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, 2, count, size, device=device))

    def forward(self, ids: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`key` and `value` [b, heads, T, size] with the learned ones where `ids` [b, T] are
        negative. `ids` are those of the keys."""
        heads, _, count, size = self.weight.shape
        table = self.weight.permute(2, 1, 0, 3).reshape(count, -1)
        found = functional.embedding(virtual_index(ids), table).unflatten(-1, (2, heads, size))
        keys, values = found.permute(2, 0, 3, 1, 4).to(key.dtype)
        virtual = (ids < 0)[:, None, :, None]
        return torch.where(virtual, keys, key), torch.where(virtual, values, value)


def prefix_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Layers, key/value heads of each, and their size."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, size


def add_prefix(model: PreTrainedModel, count: int) -> None:
    """Give each layer's attention `count` learned keys and values, in place.

    `attend_to_prefix` makes attention use them, when its kernel has been chosen.
    Raises RequestError for a model whose attention is not found.
    """
    _, heads, size = prefix_shape(model.config)
    device = model.get_input_embeddings().weight.device
    hide_virtual(model)
    for attention in attentions(model):
        setattr(attention, PREFIX, Prefix(heads, count, size, device))


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of each layer, in order."""
    found = []
    for layer in decoder_layers(model):
        named = [m for m in layer.modules() if type(m).__name__.endswith("Attention")]
        if len(named) != 1 or not model.is_backend_compatible():
            raise RequestError(
                f"adapter.kind: prefix: the attention of a {type(model).__name__} was not found "
                "in each layer; use kind: prompt, or lora"
            )
        found += named
    return found


def attend_to_prefix(model: PreTrainedModel) -> None:
    """Wrap the attention kernel that `model` has now, whichever it is.

    From here on the model is called with `virtual_ids=`, the ids [b, T] of the keys of
    attention: those of the positions that it is called with, and of a cache before them.
    """
    kernel = model.config._attn_implementation
    eager = getattr(sys.modules[type(model.base_model).__module__], "eager_attention_forward", None)
    inner: Kernel = AttentionInterface().get_interface(kernel, eager)
    name = f"rostra_prefix_{kernel}"
    AttentionInterface.register(name, _with_prefix(inner))
    masks = AttentionMaskInterface()
    if kernel in masks.valid_keys():  # a kernel of context parallelism is handed its masks
        AttentionMaskInterface.register(name, masks[kernel])
    model.set_attn_implementation(name)


def _with_prefix(inner: Kernel) -> Kernel:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        virtual_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if virtual_ids is None:
            raise RuntimeError("the model was not called with virtual_ids, or its layers drop them")
        key, value = module.get_submodule(PREFIX)(virtual_ids, key, value)
        return inner(module, query, key, value, attention_mask, **kwargs)

    return attention


def pack_prefix(weights: Mapping[int, Tensor]) -> Tensor:
    """The prefixes of all layers as peft saves them, [virtual tokens, layers * 2 * heads * size]:
    for each layer its keys, then its values."""
    parts = [weights[layer].permute(2, 1, 0, 3).flatten(1) for layer in sorted(weights)]
    return torch.cat(parts, 1).contiguous()


def unpack_prefix(packed: Tensor, layer: int, shape: tuple[int, ...]) -> Tensor:
    """What `pack_prefix` made of the prefix of one layer, of `shape`."""
    heads, two, count, size = shape
    width = two * heads * size
    part = packed[:, layer * width : (layer + 1) * width]
    return part.reshape(count, two, heads, size).permute(2, 1, 0, 3)
