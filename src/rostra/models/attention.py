"""Attention for training on CPUs, offered to every causal model of transformers.

PyTorch's own CPU kernel (SDPA) is several times slower than the matrix products in it. Here,
attention is written as batch matrix products over blocks of queries, each against only the
keys it can see, with a softmax that torch.compile fuses into one pass. As in FlashAttention
(Dao et al. 2022, arXiv:2205.14135) the probabilities are not kept for the backward pass but
computed again from the logarithm of their sum, so memory grows with T, not with T².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
from transformers.utils import is_flash_attn_2_available

from rostra.errors import RequestError

NAME = "rostra_blocked"
Requested = Literal["auto", "eager", "sdpa", "blocked", "flash_attention_2"]

_ROWS = 128  # queries in a block: the fastest of 64 to 512 for 512 positions
_BLOCKS = 16  # at most, as every block adds to the compiled graph
_LONGEST = 8192  # twice as fast as SDPA up to here; beyond it was not measured
_HIDDEN = -1e30  # the score of a key that is not seen; finite, so that no row becomes NaN


def choose(
    requested: Requested,
    device: torch.device,
    sequence_length: int,
    compiled: bool = True,
    packed: bool = False,
) -> str:
    """The name to set as `config._attn_implementation` before a model is built.

    `auto` is FlashAttention where it is installed on CUDA, else SDPA on an accelerator. On the
    CPU it is `blocked` when the model will be `compiled` (twice to three times as fast as SDPA;
    uncompiled it is slower), for up to 8192 positions. `packed` says that samples hold several
    documents and a micro batch several samples: transformers then does not tell FlashAttention
    where documents end, so it is not taken. Raises RequestError when FlashAttention is asked
    for and cannot run, or would cross documents.
    """
    register()
    flash = device.type == "cuda" and is_flash_attn_2_available()
    if requested == "flash_attention_2" and not flash:
        raise RequestError(
            "model.attention: flash_attention_2 needs a CUDA device and the package flash-attn; "
            "install it with `pip install flash-attn`, or set model.attention to auto"
        )
    if requested == "flash_attention_2" and packed:
        raise RequestError(
            "model.attention: flash_attention_2 keeps documents apart only in micro batches of "
            "one sample; set train.micro_batch_size: 1 (with a longer data.sequence_length), "
            "data.isolate_documents: false, or model.attention: auto"
        )
    if requested == "auto":
        if device.type == "cpu" and compiled and sequence_length <= _LONGEST:
            return NAME
        return "flash_attention_2" if flash and not packed else "sdpa"
    return NAME if requested == "blocked" else requested


def register() -> None:
    """Make `rostra_blocked` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, blocked_attention)
    AttentionMaskInterface.register(NAME, blocked_mask)


def blocked_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask transformers asks for before the first layer; None where it is plain causal.

    In training, what a query sees (documents, windows) is an unbroken row of keys that ends
    with itself: the mask is then the first of them, int32 [batch, 1, queries, 1]. Otherwise
    (padding, a cache) it is bool [batch, 1, queries, keys], True where a key is seen. A mask
    that may reach beyond the causal triangle is marked by being additive (0 or the least
    number), so that no block of keys is skipped.
    """
    kwargs |= {"q_length": q_length, "kv_length": kv_length, "attention_mask": attention_mask}
    kwargs |= {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function}
    union = getattr(mask_function, "__name__", "") == "or_mask"  # transformers' name
    if use_vmap or union or "allow_is_bidirectional_skip" in kwargs:
        return eager_mask(use_vmap=use_vmap, **kwargs)
    mask: Tensor | None = sdpa_mask(**kwargs)
    fresh = all(isinstance(x, int) and x == 0 for x in (q_offset, kv_offset))
    if mask is None or attention_mask is not None or q_length != kv_length or not fresh:
        return mask
    ends = torch.arange(1, q_length + 1, device=mask.device)[:, None]
    return (ends - mask.sum(-1, keepdim=True)).int()


def blocked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers' AttentionInterface calls it.

    `query` is [batch, heads, queries, head size]; `key` and `value` have `heads` or a divisor
    of it. Returns [batch, queries, heads, head size of `value`]. Decoding with a cache, where
    queries are fewer than keys, goes to SDPA. Raises RequestError for what it cannot compute.
    """
    if adds_to_scores(kwargs):
        raise RequestError(
            "model.attention: this model's attention has sinks or biases, which `blocked` does "
            "not compute; set model.attention to eager"
        )
    batch, heads, length, size = query.shape
    if attention_mask is None and 1 < length < key.shape[2]:  # an empty cache of fixed size
        key, value = key[:, :, :length], value[:, :, :length]
    square = length == key.shape[2]
    if not square and softcap is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal
        )
    pattern = Pattern(
        causal=square and looks_back(module, attention_mask, is_causal),
        window=sliding_window,
        scale=size**-0.5 if scaling is None else scaling,
        softcap=softcap,
    )
    if not square:
        return _decode(query, key, value, attention_mask, pattern), None
    device, shared = query.device.type, key.shape[1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    keep = None
    if dropout > 0:
        # drawn as eager attention draws it; 0, or what makes up for the dropped
        ones = torch.ones(batch, heads, length, length, dtype=dtype, device=query.device)
        keep = nn.functional.dropout(ones, dropout)
    with torch.autocast(device, enabled=False):
        out = BlockedAttention.apply(
            query.to(dtype).reshape(batch, shared, heads // shared, length, size),
            key.to(dtype).contiguous(),
            value.to(dtype).contiguous(),
            attention_mask,
            keep,
            pattern,
        )
    return out.flatten(1, 2).transpose(1, 2).contiguous(), None


def adds_to_scores(arguments: dict[str, Any]) -> bool:
    """Whether a layer calls its attention with sinks or biases of heads."""
    return any(arguments.get(name) is not None for name in ("s_aux", "position_bias"))


def looks_back(module: nn.Module, mask: Tensor | None, asked: bool | None) -> bool:
    """Whether no query sees a key after itself; `mask` as `blocked_mask` gives it."""
    if mask is not None and mask.dtype != torch.bool:
        return mask.dtype == torch.int32
    return asked if asked is not None else getattr(module, "is_causal", True)


@dataclass(frozen=True)
class Pattern:
    """What a query sees, and how scores are formed."""

    causal: bool
    window: int | None
    scale: float
    softcap: float | None

    def blocks(self, length: int) -> list[tuple[int, int, int, int]]:
        """(first query, end of queries, first key, end of keys) of every block."""
        rows = max(_ROWS, -(-length // _BLOCKS))
        spans = []
        for start in range(0, length, rows):
            end = min(start + rows, length)
            first = 0
            if self.causal and self.window is not None:
                first = max(0, start - self.window + 1) // rows * rows
            spans.append((start, end, first, end if self.causal else length))
        return spans

    def scores(self, products: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of products q·k in at least float32, and the tanh of the soft cap if any."""
        wide = torch.promote_types(products.dtype, torch.float32)
        scores = products.to(wide) * self.scale
        if self.softcap is None:
            return scores, None
        bent = torch.tanh(scores / self.softcap)
        return bent * self.softcap, bent

    def hide(self, scores: Tensor, mask: Tensor | None, span: tuple[int, int, int, int]) -> Tensor:
        """`scores` [batch, key heads, group, queries, keys], low where a key is not seen."""
        start, end, first, last = span
        if mask is not None and mask.dtype != torch.int32:
            part = _heads_apart(mask[..., start:end, first:last], scores.shape[1])
            return torch.where(part, scores, _HIDDEN) if part.dtype == torch.bool else scores + part
        if not self.causal:
            return scores
        at = torch.arange(start, end, device=scores.device, dtype=torch.int32)[:, None]
        keys = torch.arange(first, last, device=scores.device, dtype=torch.int32)
        seen = keys <= at
        if mask is not None:
            seen = seen & (keys >= _heads_apart(mask[..., start:end, :], scores.shape[1]))
        elif self.window is not None and self.window < end - first:
            seen = seen & (keys > at - self.window)
        return torch.where(seen, scores, _HIDDEN)


def _decode(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, pattern: Pattern
) -> Tensor:
    """A few queries against a cache, with a soft cap, which SDPA has not."""
    query = query.unflatten(1, (key.shape[1], -1))
    scores = pattern.scores(query @ key[:, :, None].transpose(3, 4))[0]
    scores = pattern.hide(scores, mask, (0, query.shape[3], 0, key.shape[2]))
    out = torch.softmax(scores, -1).to(value.dtype) @ value[:, :, None]
    return out.flatten(1, 2).transpose(1, 2).contiguous()


def _heads_apart(mask: Tensor, shared: int) -> Tensor:
    """[batch, 1 or heads, …] as [batch, key heads or 1, heads of a key head or 1, …]."""
    return mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else (shared, -1))


class BlockedAttention(torch.autograd.Function):
    """softmax(q·kᵀ)·v over blocks of queries.

    Shapes: `query` [batch, key heads, group, T, size], `key` and `value` [batch, key heads, T,
    size], `mask` as `blocked_mask` gives it, `keep` [batch, heads, T, T] (dropout's factors).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
        pattern: Pattern,
    ) -> Tensor:
        outs, sums = [], []
        for span in pattern.blocks(query.shape[3]):
            start, end, first, last = span
            rows = query[:, :, :, start:end].flatten(2, 3).contiguous()
            keys, values = (x[:, :, first:last].contiguous() for x in (key, value))
            products = _bmm(rows, keys.transpose(2, 3)).unflatten(2, (-1, end - start))
            scores = pattern.hide(pattern.scores(products)[0], mask, span)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            weights = weights.to(query.dtype)
            if keep is not None:
                weights = weights * _heads_apart(keep[..., start:end, first:last], key.shape[1])
            out = _bmm(weights.flatten(2, 3), values).unflatten(2, (-1, end - start))
            outs.append((out / total).to(query.dtype))
            sums.append(top + torch.log(total))
        out = torch.cat(outs, 3)
        ctx.save_for_backward(query, key, value, mask, keep, out, torch.cat(sums, 3))
        ctx.pattern = pattern
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With P the probabilities and D = rowsum(dO·O): dV = Pᵀ·dO,
        dS = P·(dO·Vᵀ − D), dQ = dS·K, dK = dSᵀ·Q (FlashAttention, algorithm 4).

        Everything is computed transposed: two products of three then need no transposing,
        and the compiler cannot take the scores for those of the forward pass and keep them.
        """
        query, key, value, mask, keep, out, sums = ctx.saved_tensors
        pattern: Pattern = ctx.pattern
        grad = grad.to(query.dtype)
        delta = (grad.to(sums.dtype) * out.to(sums.dtype)).sum(-1, keepdim=True)
        spans = pattern.blocks(query.shape[3])
        dquery, dkeys, dvalues = [], [], []
        for span in spans:
            start, end, first, last = span
            rows, grads = (x[:, :, :, start:end].flatten(2, 3).contiguous() for x in (query, grad))
            keys, values = key[:, :, first:last], value[:, :, first:last]

            def upright(x: Tensor, queries: int = end - start) -> Tensor:
                return x.unflatten(3, (-1, queries)).permute(0, 1, 3, 4, 2)

            def lying(x: Tensor) -> Tensor:
                return x.permute(0, 1, 4, 2, 3).flatten(3, 4).to(query.dtype)

            scores, bent = pattern.scores(upright(_bmm(keys, rows.transpose(2, 3))))
            weights = torch.exp(pattern.hide(scores, mask, span) - sums[:, :, :, start:end])
            dweights = upright(_bmm(values, grads.transpose(2, 3))).to(sums.dtype)
            kept = weights
            if keep is not None:
                factor = _heads_apart(keep[..., start:end, first:last], key.shape[1])
                kept, dweights = weights * factor, dweights * factor
            dscores = weights * (dweights - delta[:, :, :, start:end]) * pattern.scale
            if bent is not None:
                dscores = dscores * (1 - bent * bent)
            turned = lying(dscores)
            dvalues.append(_bmm(lying(kept), grads))
            dkeys.append(_bmm(turned, rows))
            dquery.append(_bmm(turned.transpose(2, 3), keys).unflatten(2, (-1, end - start)))
        dkey, dvalue = (_sum_blocks(x, spans).to(query.dtype) for x in (dkeys, dvalues))
        return torch.cat(dquery, 3), dkey, dvalue, None, None, None


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    """Batch product over two leading dimensions. (`bmm` is the fast path of the CPU.)"""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])


def _sum_blocks(parts: list[Tensor], spans: list[tuple[int, int, int, int]]) -> Tensor:
    """Add what the blocks of queries gave to each key, in at least float32."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    sums = []
    for start, end, _, _ in spans:
        seen = [
            part[:, :, start - first : end - first].to(wide)
            for part, (_, _, first, last) in zip(parts, spans, strict=True)
            if first <= start and end <= last
        ]
        sums.append(sum(seen[1:], seen[0]))
    return torch.cat(sums, 2)
