"""Dropout in front of LoRA's A, the same in every layout.

What is dropped depends on seed, step, sample, module, position and feature (see `keyed.py`). The
keys of the positions travel to each layer as an argument of the model, so a layer that is
computed again for the backward pass finds those of its own micro batch.
"""

from __future__ import annotations

import hashlib
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rostra.adapt.keyed import Inputs, Keys, Part
from rostra.batch import Batch
from rostra.models import decoder_layers

KEYS = "dropout_keys"  # the argument under which the model hands keys [b, T] to its layers

# The finaliser of MurmurHash3 (Appleby 2011), as signed numbers: 32 bits are enough for a choice.
_FIRST = 0x85EBCA6B - (1 << 32)
_SECOND = 0xC2B2AE35 - (1 << 32)


class KeyedDropout(nn.Module):
    """Drops features of [b, T, features], or of [b T, features], while training.

    Without keys, when `key_dropout` did not prepare the model, it draws as `nn.Dropout` does.
    """

    def __init__(self, p: float, name: str) -> None:
        super().__init__()
        self.p = p
        digest = hashlib.sha256(name.encode()).digest()
        self.salt = int.from_bytes(digest[:4], "big", signed=True)  # of this module
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keys is None:
            return functional.dropout(x, self.p, self.training)
        rows = self.keys.reshape(x.shape[:-1])
        features = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
        mixed = _mixed(rows[..., None].int() ^ _mixed(features ^ self.salt))
        kept = (mixed & 0x7FFFFFFF) >= int(self.p * 2**31)
        return torch.where(kept, x, 0) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _mixed(x: Tensor) -> Tensor:
    """A hash of each number of `x`, int32."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _SECOND
    return x ^ ((x >> 16) & 0xFFFF)


def replace_dropout(model: PreTrainedModel, adapter: str) -> None:
    """Put `KeyedDropout` in the place of the dropouts of the adapter of this name, in place."""
    for name, module in model.named_modules():
        dropout = getattr(module, "lora_dropout", {})
        if adapter in dropout and isinstance(dropout[adapter], nn.Dropout):
            dropout[adapter] = KeyedDropout(dropout[adapter].p, name)


def key_dropout(model: PreTrainedModel, keys: Keys, inputs: Inputs, part: Part) -> Inputs:
    """Let the dropouts of `model`, whole or a stage, know what they drop, in place; returns what
    `inputs` has to be replaced by, which is `inputs` where nothing drops.

    Before layers are checkpointed and compiled. `part` is as in `Neftune.attach`. Parts of layers
    that are computed again by themselves (selective:attention, selective:mlp) find the keys of
    the last micro batch that went forward: not their own in a pipeline.
    """
    if not _dropouts(model):
        return inputs
    for layer in decoder_layers(model):
        if _dropouts(layer):
            layer.register_forward_pre_hook(_note_keys, with_kwargs=True)
            layer.forward = MethodType(_with_keys, layer)
    if head := _dropouts(model.get_output_embeddings()):
        # It follows its micro batch's pass through the body at once, and is never computed again.
        model.base_model.register_forward_pre_hook(partial(_give_keys, head), with_kwargs=True)

    def prepared(batch: Batch) -> tuple[dict[str, Any], Any]:
        arguments, own = inputs(batch)
        return {**arguments, KEYS: part(keys.positions(batch.input_ids))}, own

    return prepared


def _dropouts(layer: nn.Module) -> list[KeyedDropout]:
    return [module for module in layer.modules() if isinstance(module, KeyedDropout)]


def _note_keys(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The keys of a micro batch to the dropouts of a layer."""
    _give_keys(_dropouts(layer), layer, args, kwargs)


def _give_keys(
    dropouts: list[KeyedDropout], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for dropout in dropouts:
        dropout.keys = kwargs.get(KEYS)


def _with_keys(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer; when it is computed again, with the keys of that time. Compiled
    code saves them with what else it needs, and cannot set attributes there."""
    if not torch.compiler.is_compiling():
        _note_keys(layer, args, kwargs)
    kwargs.pop(KEYS, None)  # a model that only generates is called without
    return type(layer).forward(layer, *args, **kwargs)
