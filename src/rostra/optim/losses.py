"""Losses: sums over target tokens, to be divided by the targets of the whole global batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional

from rostra.batch import IGNORE

Parts = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of a head's weight a rank has, when the vocabulary is split over a group."""

    first: int  # the token of this rank's first row
    group: dist.ProcessGroup


def cross_entropy_sum(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of -log softmax(logits)[label], in nats, over labels that are not IGNORE, each times
    its weight.

    `logits` [..., vocabulary] of any float type, `labels` and `weights` [...]; computed in
    float32.
    """
    each = functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return each.sum() if weights is None else (each * weights.flatten()).sum()


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float | Tensor = 1.0,
    chunk: int = 1024,
    bias: Tensor | None = None,
    softcap: float | None = None,
    compiled: bool = False,
    vocabulary: VocabularyShard | None = None,
    weights: Tensor | None = None,
    update: Parts | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a language model's head, without the logits of the whole batch.

    `hidden` [..., size], `weight` [vocabulary, size], `bias` [vocabulary], `labels` [...], and
    `weights` [...], by which each label counts (1 without; 0 where there is none).
    Returns (scale x sum, sum): float32 scalars, the first to call backward on, the second
    detached, both over labels that are not IGNORE. Logits exist for `chunk` positions at once.
    Products run in autocast's type where that is on, else in hidden's; softmax and sums in
    float32. `softcap` c bends logits to c·tanh(logits / c) first (Gemma 2, arXiv:2408.00118).
    `compiled` has torch.compile fuse what lies between the products. `update` is what LoRA adds
    to the logits, in two factors that are never multiplied for all positions: u [..., rank] and
    B [vocabulary, rank], for u·Bᵀ.

    With `vocabulary`, `weight` and `bias` are this rank's rows of a head split over a process
    group, all of whose ranks call this with the same `hidden` and `labels`. The result is the
    whole loss on every rank, the gradient of `hidden` this rank's part, to be summed over the
    group. A chunk sends two small all-reduces of float32: the largest logit of each position,
    then its sum of exponentials and the label's logit. (`compiled` is then without effect.)

    The gradients are computed with the loss, chunk by chunk (as in Hsu et al. 2024,
    arXiv:2410.10989): with z = h·Wᵀ and p = softmax(z), dz = scale·w·(p - onehot(label)),
    dh = dz·W, dW = dzᵀ·h, and likewise of u and B. So nothing is computed twice, and a `scale`
    that holds the loss scale is in dz before it is rounded to float16.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    differentiate = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden, weight, bias, *(update or ()))
    )
    factor = torch.as_tensor(scale, dtype=torch.float32, device=hidden.device)
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    counts = None if weights is None else weights.reshape(-1)
    narrow, wide = (None, None) if update is None else (update[0].flatten(0, -2), update[1])
    piece = _compiled_piece() if compiled else _piece
    if vocabulary is not None:
        piece = functools.partial(_piece, vocabulary=vocabulary)
    with torch.autocast(device, enabled=False):
        loss, total = _ChunkedCrossEntropy.apply(
            flat, weight, bias, narrow, wide,
            targets, counts, factor, chunk, softcap, dtype, piece, differentiate,
        )  # fmt: skip
    return loss, total


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        narrow: Tensor | None,
        wide: Tensor | None,
        labels: Tensor,
        counts: Tensor | None,
        scale: Tensor,
        chunk: int,
        softcap: float | None,
        dtype: torch.dtype,
        piece: Callable[..., Parts],
        differentiate: bool,
    ) -> tuple[Tensor, Tensor]:
        head, more = weight.to(dtype), None if wide is None else wide.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        exact = torch.promote_types(weight.dtype, torch.float32)
        wanted = ctx.needs_input_grad[:5] if differentiate else (False,) * 5
        dhidden = torch.zeros_like(hidden) if wanted[0] else None
        dweight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        dbias = torch.zeros_like(bias, dtype=exact) if wanted[2] and bias is not None else None
        dnarrow = torch.zeros_like(narrow) if wanted[3] and narrow is not None else None
        dwide = torch.zeros_like(wide, dtype=exact) if wanted[4] and wide is not None else None
        for start in _chunks_with_targets(labels, chunk):
            rows = slice(start, start + chunk)
            part = hidden[rows].to(dtype)
            thin = None if narrow is None else narrow[rows].to(dtype)
            count = None if counts is None else counts[rows]
            loss, dlogits = piece(
                part, head, bias, thin, more, labels[rows], count, scale, softcap, differentiate
            )
            total += loss
            if dhidden is not None:
                dhidden[rows] = dlogits @ head
            if dweight is not None:
                dweight += dlogits.t() @ part
            if dbias is not None:
                dbias += dlogits.sum(0, dtype=dbias.dtype)
            if dnarrow is not None and more is not None:
                dnarrow[rows] = dlogits @ more
            if dwide is not None and thin is not None:
                dwide += dlogits.t() @ thin
        ctx.save_for_backward(
            dhidden, _as(dweight, weight), _as(dbias, bias), dnarrow, _as(dwide, wide)
        )
        ctx.mark_non_differentiable(total)
        return scale * total, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return (*grads, *[None] * 8)


def _as(gradient: Tensor | None, of: Tensor | None) -> Tensor | None:
    """A gradient in the type of what it is of."""
    return None if gradient is None or of is None else gradient.to(of.dtype)


def _chunks_with_targets(labels: Tensor, chunk: int) -> list[int]:
    """Where chunks start; on the CPU, where looking is free, only those with a target."""
    starts = range(0, len(labels), chunk)
    traced = isinstance(labels, FakeTensor) or torch.compiler.is_compiling()  # without values
    if traced or labels.device.type != "cpu":
        return list(starts)
    targets = labels != IGNORE
    return [start for start in starts if targets[start : start + chunk].any()]


def _piece(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    narrow: Tensor | None,
    wide: Tensor | None,
    labels: Tensor,
    count: Tensor | None,
    scale: Tensor,
    softcap: float | None,
    differentiate: bool,
    vocabulary: VocabularyShard | None = None,
) -> Parts:
    """Loss of one chunk, and the gradient of its logits (empty when not asked for)."""
    logits = (hidden @ head.t()).float()
    if narrow is not None and wide is not None:
        logits = logits + narrow @ wide.t()
    if bias is not None:
        logits = logits + bias
    bent = None
    if softcap is not None:
        bent = torch.tanh(logits / softcap)
        logits = bent * softcap
    target = labels != IGNORE
    if vocabulary is None:
        log_sum = torch.logsumexp(logits, 1)
        chosen = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    else:
        labels = labels - vocabulary.first
        log_sum, chosen = _over_shards(logits, labels, vocabulary.group)
    count = target.float() if count is None else count
    loss = torch.where(target, (log_sum - chosen) * count, 0).sum()
    if not differentiate:
        return loss, hidden.new_empty(0)
    columns = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    probability = torch.exp(logits - log_sum[:, None])
    dlogits = torch.where(columns == labels.int()[:, None], probability - 1, probability)
    dlogits = dlogits * (target * count * scale)[:, None]
    if bent is not None:
        dlogits = dlogits * (1 - bent * bent)
    return loss, dlogits.to(hidden.dtype)


def _over_shards(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Parts:
    """log Σ exp over the columns of all ranks, and the label's logit, wherever it is.

    `logits` are this rank's columns, `labels` count from the first of them.
    """
    top = logits.amax(1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    columns = logits.shape[1]
    here = (labels >= 0) & (labels < columns)
    chosen = logits.gather(1, labels.clamp(0, columns - 1)[:, None])[:, 0]
    sums = torch.stack((torch.exp(logits - top[:, None]).sum(1), torch.where(here, chosen, 0)))
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    return top + torch.log(sums[0]), sums[1]


@functools.cache
def _compiled_piece() -> Callable[..., Parts]:
    compiled: Callable[..., Parts] = torch.compile(_piece, dynamic=False)
    return compiled
