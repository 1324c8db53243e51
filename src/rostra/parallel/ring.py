"""Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values travel, queries stay.

A rank keeps its queries. The keys and values of all ranks pass by, one slice at a time, each
sent on while what it gives to the queries is computed. Parts of the output are joined by the
running maximum and sum of their scores; only the logarithm of the sum is kept for the backward
pass, where keys and values go around again with their gradients behind them. So memory grows
with T / c on each of c ranks, and no number of heads has to be divisible by c.

Under a causal mask a contiguous slice would have the more to do the later it is. So a sample is
cut into 2c chunks, and rank r has the chunks r and 2c-1-r: of every slice that passes by, each
rank then sees as many pairs of queries and keys, and never computes the others.

A rank sends c-1 times forward (keys and values together) and 2 (c-1) times backward (the same,
and their gradients, these in float32). Keys travel as they are, with fewer heads than queries.

Attention is plain batch products by blocks on every device. (PyTorch's fused kernels for CUDA
that return the logarithm of the sum, as `aten._scaled_dot_product_flash_attention`, take no
documents, windows or soft caps, and are not used yet.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rostra.batch import Batch
from rostra.models.attention import Pattern, looks_back
from rostra.parallel.context import Context, as_computed, expect, refusal, shared_fields
from rostra.parallel.ring_blocks import HIDDEN, Block, first_keys, places, seen_blocks

NAME = "rostra_ring"

# Queries and keys of a block, at most: on CPUs the fastest of 64 to 1024, on other devices, where
# blocks cost a launch each, not measured.
_BLOCK, _LARGE = {"cpu": 256}, 1024


def split_ring(model: PreTrainedModel, group: dist.ProcessGroup | DeviceMesh) -> Ring:
    """Make `model` compute two chunks of each sample's positions on every rank of `group`.

    As `split_context`, but for the attention kernel that was asked for: ring attention takes its
    place. Layers that are compiled have a break of their graph around it; within activation
    checkpointing torch.compile takes no break, and what is computed again stays uncompiled.
    Raises RequestError for a model whose attention cannot be split so.
    """
    shared = shared_fields(model, group)
    AttentionInterface.register(NAME, torch.compiler.disable(_ring_attention))
    AttentionMaskInterface.register(NAME, first_keys)
    model.set_attn_implementation(NAME)
    return Ring(**shared, config=model.config)


@dataclass(frozen=True, eq=False)
class Ring(Context):
    """The ranks among which keys and values go around: from each to the next."""

    def part(self, positions: Tensor) -> Tensor:
        """The two chunks of this rank [samples, T / size] of a batch's tensor [samples, T]."""
        chunks = positions.chunk(2 * self.size, 1)
        return torch.cat([chunks[place] for place in places(self.size, self.rank)], 1)

    def inputs(self, batch: Batch, isolate: bool) -> dict[str, Any]:
        """As of a `Context`; the mask is the first key that each query of this rank sees."""
        inputs = super().inputs(batch, isolate)

        def own(mask: Tensor) -> Tensor:
            if mask.dtype != torch.int32:
                raise refusal(self.size, "this model looks ahead of a position", other="ulysses")
            return mask if mask.numel() == 1 else self.part(mask.flatten(1))[:, None, :, None]

        return inputs | {"attention_mask": tree_map(own, inputs["attention_mask"])}

    def blocks(self, source: int, query: Tensor, pattern: Pattern) -> Iterator[Block]:
        """What `query` [.., T / size, d] of this rank sees of the keys of rank `source`."""
        most = _BLOCK.get(query.device.type, _LARGE)
        return seen_blocks(self.size, self.rank, source, query.shape[-2], pattern.window, most)

    def pass_on(self, *tensors: Tensor) -> Passing:
        """Send tensors to the next rank, all in one message, while others do the same."""
        sent = torch.cat([x.reshape(-1) for x in tensors])
        got = torch.empty_like(sent)
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=following),
                dist.P2POp(dist.irecv, got, group=self.group, group_peer=before),
            ]
        )
        return Passing(sent, got, [x.shape for x in tensors], works)

    def around(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Each rank's tensors with that rank, this one's first; the next are on their way
        while the caller looks at these."""
        for step in range(self.size):
            passing = self.pass_on(*tensors) if step < self.size - 1 else None
            yield (self.rank - step) % self.size, tensors
            if passing is not None:
                tensors = passing.wait()


@dataclass(frozen=True)
class Passing:
    """Tensors on their way. What is sent must not change, nor be freed, before it has left."""

    sent: Tensor
    got: Tensor
    shapes: list[torch.Size]
    works: list[Any]

    def wait(self) -> tuple[Tensor, ...]:
        """Those of the rank before."""
        for work in self.works:
            work.wait()
        parts = self.got.split([shape.numel() for shape in self.shapes])
        return tuple(x.view(shape) for x, shape in zip(parts, self.shapes, strict=True))


def _ring_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    context: Context | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers' AttentionInterface calls it.

    `query` is [b, heads, T / size, d], `key` and `value` have a divisor of its heads; returns
    [b, T / size, heads, d].
    """
    ring = expect(Ring, context, kwargs)
    causal = looks_back(module, None, is_causal)
    if not causal or dropout:
        what = f"ring attention knows no dropout ({dropout})" if causal else "it looks ahead"
        raise refusal(ring.size, what, other="ulysses")
    query, key, value = as_computed(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):
        out = RingAttention.apply(
            query.unflatten(1, (key.shape[1], -1)),
            key,
            value,
            None if attention_mask.numel() == 1 else attention_mask,
            Pattern(True, sliding_window, scale, softcap),
            ring,
        )
    return out.flatten(1, 2).transpose(1, 2).contiguous(), None


@dataclass
class _Rows:
    """The output of this rank's queries [b, key heads, group, T / size, d] so far, not yet
    divided by `total`, the sum of exp(score - top) [..., 1], where `top` is the highest score.

    (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3; what was added for a lower top,
    and for rows that have not seen a key yet, is scaled down, then to nothing.)
    """

    out: Tensor
    top: Tensor = field(init=False)
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.top = torch.full_like(self.out[..., :1], HIDDEN)
        self.total = torch.zeros_like(self.top)

    def add(self, rows: slice, scores: Tensor, values: Tensor) -> None:
        """What keys of these scores [.., rows, keys] and values [b, key heads, keys, d] give."""
        out, old, total = (x[:, :, :, rows] for x in (self.out, self.top, self.total))
        top = torch.maximum(old, scores.amax(-1, keepdim=True))
        weights, fewer = torch.exp(scores - top), torch.exp(old - top)
        total.mul_(fewer).add_(weights.sum(-1, keepdim=True))
        out.mul_(fewer).add_(_times(weights.to(values.dtype), values))
        old.copy_(top)


class RingAttention(torch.autograd.Function):
    """softmax(q·kᵀ)·v over the keys of all ranks of a ring.

    Shapes: `query` [b, key heads, group, T / size, d], `key` and `value` [b, key heads, T / size,
    d], `first` as `Ring.inputs` gives it. Every rank calls it, forward and backward, with the
    same shapes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: Tensor | None,
        pattern: Pattern,
        ring: Ring,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = (*query.shape[:-1], value.shape[-1])
        sums = _Rows(torch.zeros(shape, dtype=wide, device=query.device))
        for source, (keys, values) in ring.around(key, value):
            for block in ring.blocks(source, query, pattern):
                scores, _ = _scores(query, keys, first, pattern, block)
                sums.add(block.rows, scores, values[:, :, block.columns])
        out = (sums.out / sums.total).to(query.dtype)
        ctx.save_for_backward(query, key, value, first, out, sums.top + torch.log(sums.total))
        ctx.pattern, ctx.ring = pattern, ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """As of `BlockedAttention`. The gradients of a slice of keys follow it around the ring,
        one step behind; the rank that it belongs to adds its own at the end."""
        query, key, value, first, out, sums = ctx.saved_tensors
        ring: Ring = ctx.ring
        back = _Backward(query, first, out, sums, grad.to(query.dtype), ctx.pattern)
        own: tuple[Tensor, ...] = ()
        behind: Passing | None = None
        for source, (keys, values) in ring.around(key, value):
            found = back.through(keys, values, ring.blocks(source, query, ctx.pattern))
            if source == ring.rank:
                own = found
                continue
            if behind is not None:
                found = _sum(found, behind.wait())
            behind = ring.pass_on(*found)
        if behind is not None:
            own = _sum(own, behind.wait())
        dquery, dkey, dvalue = (x.to(query.dtype) for x in (back.dquery, *own))
        return dquery, dkey, dvalue, None, None, None


@dataclass
class _Backward:
    """The gradient of this rank's queries, as slices of keys and values pass by."""

    query: Tensor
    first: Tensor | None
    out: Tensor
    sums: Tensor  # the logarithm of the sum of each query's exp(score)
    grad: Tensor  # of `out`
    pattern: Pattern

    def __post_init__(self) -> None:
        wide = self.sums.dtype
        self.delta = (self.grad.to(wide) * self.out.to(wide)).sum(-1, keepdim=True)
        self.dquery = torch.zeros_like(self.query, dtype=wide)

    def through(self, keys: Tensor, values: Tensor, blocks: Iterable[Block]) -> tuple[Tensor, ...]:
        """What this rank's queries give to the gradients of `keys` and `values`."""
        dtype, wide = self.query.dtype, self.sums.dtype
        dkeys, dvalues = (torch.zeros_like(x, dtype=wide) for x in (keys, values))
        for block in blocks:
            scores, bent = _scores(self.query, keys, self.first, self.pattern, block)
            rows, columns = block.rows, block.columns
            weights = torch.exp(scores - self.sums[:, :, :, rows])
            grads, queries = self.grad[:, :, :, rows], self.query[:, :, :, rows]
            dscores = _times(grads, values[:, :, columns].mT) - self.delta[:, :, :, rows]
            dscores = dscores * weights * self.pattern.scale
            if bent is not None:
                dscores = dscores * (1 - bent * bent)
            dscores, weights = dscores.to(dtype), weights.to(dtype)
            self.dquery[:, :, :, rows] += _times(dscores, keys[:, :, columns])
            dkeys[:, :, columns] += _summed(dscores, queries)
            dvalues[:, :, columns] += _summed(weights, grads)
        return dkeys, dvalues


def _sum(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x + y for x, y in zip(some, others, strict=True))


def _scores(
    query: Tensor, keys: Tensor, first: Tensor | None, pattern: Pattern, block: Block
) -> tuple[Tensor, Tensor | None]:
    """Scores of a block [b, key heads, group, queries, keys], and the tanh of the soft cap."""
    products = _times(query[:, :, :, block.rows], keys[:, :, block.columns].mT)
    scores, bent = pattern.scores(products)
    return block.hide(scores, first, pattern.window), bent


def _times(left: Tensor, right: Tensor) -> Tensor:
    """[b, key heads, group, n, m] times [b, key heads, m, k], for all of a group at once."""
    return (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


def _summed(left: Tensor, right: Tensor) -> Tensor:
    """The transposed of [b, key heads, group, n, m] times [.., n, k], summed over the group."""
    return left.flatten(2, 3).mT @ right.flatten(2, 3)
