"""Context parallelism: every rank of a group holds a slice of each sample's positions.

Only attention looks beyond a slice. Here, an all-to-all around it trades positions for heads
(Ulysses; Jacobs et al. 2023, arXiv:2309.14509): a rank then holds all positions of its share
of the heads, so that any attention kernel of transformers computes what it always does, masks
of documents and windows included. The other method is in `ring.py`.

A layer takes two all-to-alls forward (queries, keys and values travel together; then the
outputs) and two backward. A rank sends (c-1)/c of its slice of q, k, v and of the output.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

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
from rostra.models.attention import adds_to_scores

NAME = "rostra_ulysses"
Method = Literal["ulysses", "ring"]

# Kinds of layers that look beyond their own position by attention alone.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_DROPOUTS = ("attention_dropout", "attn_pdrop")  # what configs call that of probabilities


def check_context(
    config: PretrainedConfig,
    size: int,
    length: int,
    tensor: int = 1,
    method: Method = "ulysses",
) -> None:
    """Refuse a context size that cannot split this model, or samples of `length` positions.

    `tensor` ranks have split the query heads before. Heads of keys and values need not be
    divisible; under `ring`, none need be. Raises RequestError with the nearest size that works,
    and with the method that takes this one, if any.
    """
    if size == 1:
        return
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0) // tensor
    if (other := set(getattr(text, "layer_types", None) or ()) - _ATTENTION) or not heads:
        layers = f"{min(other)} layers" if other else "layers without attention"
        raise refusal(size, f"this model has {layers}, which need all positions at once")
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_type" in ropes else ropes.values():
        trained = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if rope["rope_type"] in ("dynamic", "longrope") and length > trained:
            why = f"beyond {trained} positions ({rope['rope_type']})"
            raise refusal(size, f"this model's rotations depend on a sample's length {why}")
    sizes = range(1, max(heads, length // 2) + 1)
    what = f"data.sequence_length ({length})"
    if method == "ring":
        if dropout := max(getattr(text, name, None) or 0.0 for name in _DROPOUTS):
            raise refusal(size, f"ring attention knows no dropout ({dropout})", other="ulysses")
        works = [n for n in sizes if length % (2 * n) == 0] or [1]
        why = f"a rank of a ring has two chunks of a sample, and twice this does not divide {what}"
    else:
        works = [n for n in sizes if heads % n == 0 and length % n == 0]
        if heads % size:
            what = f"{heads} query heads" + (f" of each of {tensor} tensor ranks" * (tensor > 1))
        why = f"it does not divide the {what}"
    if size not in works:
        rings = method == "ulysses" and length % (2 * size) == 0
        nearest = min(works, key=lambda n: abs(n - size))
        raise refusal(size, why, nearest, other="ring" if rings else None)


def refusal(size: int, why: str, instead: int = 1, other: Method | None = None) -> RequestError:
    """What cannot be split; the size to take instead, and the method under which it works."""
    method = "" if other is None else f", or parallel.context_method: {other}"
    return RequestError(
        f"parallel.context = {size}: {why}; set parallel.context: {instead}{method}"
    )


def split_context(model: PreTrainedModel, group: dist.ProcessGroup | DeviceMesh) -> Ulysses:
    """Make `model` compute a slice of each sample's positions on every rank of `group`.

    The attention kernel stays the one that `model.config` names now. From here on the model is
    called with what `inputs` of the returned value makes of a batch. A rank's loss is the sum
    over its slice; gradients of parameters are to be summed over the group. Raises RequestError
    for a model whose attention cannot be split so.
    """
    shared = shared_fields(model, group)
    kernel = model.config._attn_implementation
    eager = getattr(sys.modules[type(model.base_model).__module__], "eager_attention_forward", None)
    if kernel == "eager" and eager is None:
        raise refusal(shared["size"], "this model's eager attention was not found")
    ulysses = Ulysses(
        **shared,
        config=deepcopy(model.config),
        kernel=AttentionInterface().get_interface(kernel, eager),
    )
    AttentionInterface.register(NAME, _ulysses_attention)
    model.set_attn_implementation(NAME)
    return ulysses


def shared_fields(model: PreTrainedModel, group: dist.ProcessGroup | DeviceMesh) -> dict[str, Any]:
    """The fields of a `Context`, but for `config`.

    Raises RequestError for a model whose attention cannot be split.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if not model.is_backend_compatible() or not takes_positions(model):
        why = f"the attention of a {type(model).__name__} cannot be exchanged"
        raise refusal(group.size(), why)
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise refusal(group.size(), "this model has convolutions over positions")
    return {
        "group": group,
        "size": group.size(),
        "rank": group.rank(),
        "masks": getattr(model, "create_masks_for_generate", create_masks_for_generate),
    }


@dataclass(frozen=True, eq=False)
class Context(ABC):
    """What attention has to know of the group; the model hands it on to every layer."""

    group: dist.ProcessGroup
    size: int
    rank: int
    config: PretrainedConfig  # naming what the masks are made for
    masks: Callable[..., Any]  # transformers' masks, by kind of layer where there are several

    @abstractmethod
    def part(self, positions: Tensor) -> Tensor:
        """This rank's positions [samples, T / size] of a batch's tensor [samples, T]."""

    def inputs(self, batch: Batch, isolate: bool) -> dict[str, Any]:
        """The keyword arguments of `model` (or its `base_model`) for a whole micro batch.

        The mask is made for all positions; `isolate` keeps documents apart, which
        `batch.position_ids` tell.
        """
        samples, length = batch.input_ids.shape
        positions = batch.position_ids
        if not isolate:
            positions = torch.arange(length, device=positions.device).expand(samples, -1)
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
            "context": self,
        }


@dataclass(frozen=True, eq=False)
class Ulysses(Context):
    """Positions are traded for heads, and a kernel of transformers' computes attention."""

    kernel: Callable[..., tuple[Tensor, Tensor | None]]

    def part(self, positions: Tensor) -> Tensor:
        """The slice [samples, T / size] of this rank: one run of positions."""
        return positions.chunk(self.size, 1)[self.rank]

    def inputs(self, batch: Batch, isolate: bool) -> dict[str, Any]:
        """As of a `Context`; the mask is the kernel's own, of all positions."""
        inputs = super().inputs(batch, isolate)
        if isolate and "flash" in self.config._attn_implementation:
            inputs |= _borders(batch.position_ids)
        return inputs

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
    context: Ulysses | None = None,
    position_ids: Tensor | None = None,  # of the slice alone: the mask has them all
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers' AttentionInterface calls it.

    `query` is [b, heads, T / size, d], `key` and `value` have a divisor of its heads; returns
    [b, T / size, heads, d].
    """
    ulysses = expect(Ulysses, context, kwargs)
    query, key, value = as_computed(query, key, value)
    # Heads of keys are repeated only until they can be dealt out: then the heads of queries
    # that a rank has are served by the heads of keys that it has.
    repeat = math.lcm(key.shape[1], ulysses.size) // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    query, key, value = ulysses.heads(query, key, value)
    inner = _Module(module, ulysses.config, query.shape[1] // key.shape[1])
    out, _ = ulysses.kernel(inner, query, key, value, attention_mask, **kwargs)
    return ulysses.positions(out), None


C = TypeVar("C", bound=Context)


def expect(kind: type[C], context: Context | None, arguments: dict[str, Any]) -> C:
    """The context that a layer was handed; `arguments` is what else attention was called with.

    Raises RequestError where among these are sinks or biases of heads.
    """
    if not isinstance(context, kind):
        name = kind.__name__
        raise RuntimeError(f"the model was not called with {name}.inputs, or its layers drop them")
    if adds_to_scores(arguments):
        raise refusal(context.size, "this model's attention has sinks or biases of its heads")
    return context


def as_computed(*states: Tensor) -> list[Tensor]:
    """In autocast's type: attention would convert them, after twice the bytes have travelled."""
    device = states[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(states)
    return [x.to(torch.get_autocast_dtype(device)) for x in states]
