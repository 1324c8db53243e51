"""Context parallelism: every rank of a group holds a slice of each sample's positions.

Only attention looks beyond a slice. Around it, an all-to-all trades positions for heads
(Ulysses; Jacobs et al. 2023, arXiv:2309.14509): a rank then holds all positions of its share
of the heads, so that any attention kernel of transformers computes what it always does, masks
of documents and windows included.

A layer takes two all-to-alls forward (queries, keys and values travel together; then the
outputs) and two backward. A rank sends (c-1)/c of its slice of q, k, v and of the output.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from rostra.batch import Batch
from rostra.errors import RequestError
from rostra.models import takes_positions

NAME = "rostra_ulysses"

# Kinds of layers that look beyond their own position by attention alone.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def check_context(config: PretrainedConfig, size: int, length: int, tensor: int = 1) -> None:
    """Refuse a context size that cannot split this model, or samples of `length` positions.

    `tensor` ranks have split the query heads before. Heads of keys and values need not be
    divisible. Raises RequestError with the nearest size that works.
    """
    if size == 1:
        return
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0) // tensor
    if (other := set(getattr(text, "layer_types", None) or ()) - _ATTENTION) or not heads:
        layers = f"{min(other)} layers" if other else "layers without attention"
        raise _refusal(size, f"this model has {layers}, which need all positions at once")
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_type" in ropes else ropes.values():
        trained = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if rope["rope_type"] in ("dynamic", "longrope") and length > trained:
            why = f"beyond {trained} positions ({rope['rope_type']})"
            raise _refusal(size, f"this model's rotations depend on a sample's length {why}")
    if heads % size == 0 and length % size == 0:
        return
    works = [n for n in range(1, heads + 1) if heads % n == 0 and length % n == 0]
    nearest = min(works, key=lambda n: abs(n - size))
    what = f"data.sequence_length ({length})"
    if heads % size:
        what = f"{heads} query heads" + (f" of each of {tensor} tensor ranks" * (tensor > 1))
    raise _refusal(size, f"it does not divide the {what}", nearest)


def _refusal(size: int, why: str, instead: int = 1) -> RequestError:
    return RequestError(f"parallel.context = {size}: {why}; set parallel.context: {instead}")


def split_context(model: PreTrainedModel, group: dist.ProcessGroup | DeviceMesh) -> Ulysses:
    """Make `model` compute a slice of each sample's positions on every rank of `group`.

    The attention kernel stays the one that `model.config` names now. From here on the model is
    called with what `inputs` of the returned value makes of a batch. A rank's loss is the sum
    over its slice; gradients of parameters are to be summed over the group. Raises RequestError
    for a model whose attention cannot be split so.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    kernel = model.config._attn_implementation
    eager = getattr(sys.modules[type(model.base_model).__module__], "eager_attention_forward", None)
    if not model.is_backend_compatible() or not takes_positions(model):
        why = f"the attention of a {type(model).__name__} cannot be exchanged"
        raise _refusal(group.size(), why)
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise _refusal(group.size(), "this model has convolutions over positions")
    if kernel == "eager" and eager is None:
        raise _refusal(group.size(), "this model's eager attention was not found")
    ulysses = Ulysses(
        group=group,
        size=group.size(),
        rank=group.rank(),
        config=deepcopy(model.config),
        kernel=AttentionInterface().get_interface(kernel, eager),
        masks=getattr(model, "create_masks_for_generate", create_masks_for_generate),
    )
    AttentionInterface.register(NAME, _ulysses_attention)
    model.set_attn_implementation(NAME)
    return ulysses


@dataclass(frozen=True, eq=False)
class Ulysses:
    """What attention has to know of the group; the model hands it on to every layer."""

    group: dist.ProcessGroup
    size: int
    rank: int
    config: PretrainedConfig  # naming the kernel that computes attention
    kernel: Callable[..., tuple[Tensor, Tensor | None]]
    masks: Callable[..., Any]  # transformers' masks, by kind of layer where there are several

    def part(self, positions: Tensor) -> Tensor:
        """This rank's slice [samples, T / size] of a batch's tensor [samples, T]."""
        return positions.chunk(self.size, 1)[self.rank]

    def inputs(self, batch: Batch, isolate: bool) -> dict[str, Any]:
        """The keyword arguments of `model` (or its `base_model`) for a whole micro batch.

        The mask is that of all positions, as the kernel wants it; `isolate` keeps documents
        apart, which `batch.position_ids` tell.
        """
        samples, length = batch.input_ids.shape
        positions = batch.position_ids
        if not isolate:
            positions = torch.arange(length, device=positions.device).expand(samples, -1)
        flash = "flash" in self.config._attn_implementation
        return {
            "input_ids": self.part(batch.input_ids),
            "position_ids": self.part(positions),
            # transformers takes no more than the shape, type and device of embeddings
            "attention_mask": self.masks(
                config=self.config,
                inputs_embeds=positions.new_empty(samples, length, 0, dtype=torch.float32),
                attention_mask=None,
                past_key_values=None,
                position_ids=positions if isolate else None,
            ),
            "use_cache": False,
            "ulysses": self,
            **(_borders(positions) if isolate and flash else {}),
        }

    def heads(self, *states: Tensor) -> list[Tensor]:
        """Each [b, heads, T / size, d] as [b, heads / size, T, d], by one all-to-all."""
        parts = [x.unflatten(1, (self.size, -1)).movedim(1, 0) for x in states]
        sent = torch.cat([part.flatten(1) for part in parts], 1)
        got = all_to_all_single_autograd(sent, None, None, self.group)
        split = got.split([part[0].numel() for part in parts], 1)
        whole = [x.view(part.shape) for x, part in zip(split, parts, strict=True)]
        return [x.movedim(0, 2).flatten(2, 3) for x in whole]

    def positions(self, out: Tensor) -> Tensor:
        """[b, T, heads / size, d] as [b, T / size, heads, d], by one all-to-all."""
        sent = out.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        got = all_to_all_single_autograd(sent, None, None, self.group)
        return got.movedim(0, 2).flatten(2, 3)


def _borders(positions: Tensor) -> dict[str, Any]:
    """Where documents begin and end, as FlashAttention takes it: over all samples in a row."""
    (queries, keys), (longest, _) = prepare_fa_kwargs_from_position_ids(positions)
    lengths = {"max_length_q": int(longest), "max_length_k": int(longest)}
    return {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys, **lengths}


class _Module:
    """An attention module as its kernel sees it: with the heads of one rank."""

    training = True  # a dropout of 0 arrives where nothing is to be dropped

    def __init__(self, module: nn.Module, config: PretrainedConfig, groups: int) -> None:
        self.module = module
        self.config = config
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    ulysses: Ulysses | None = None,
    position_ids: Tensor | None = None,  # of the slice alone: the mask has them all
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers' AttentionInterface calls it.

    `query` is [b, heads, T / size, d], `key` and `value` have a divisor of its heads; returns
    [b, T / size, heads, d].
    """
    if ulysses is None:
        raise RuntimeError("the model was not called with Ulysses.inputs, or its layers drop them")
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise _refusal(ulysses.size, "this model's attention has sinks or biases of its heads")
    device = query.device.type
    if torch.is_autocast_enabled(device):  # the kernel would do it, after twice the bytes
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # Heads of keys are repeated only until they can be dealt out: then the heads of queries
    # that a rank has are served by the heads of keys that it has.
    repeat = math.lcm(key.shape[1], ulysses.size) // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    query, key, value = ulysses.heads(query, key, value)
    inner = _Module(module, ulysses.config, query.shape[1] // key.shape[1])
    out, _ = ulysses.kernel(inner, query, key, value, attention_mask, **kwargs)
    return ulysses.positions(out), None
