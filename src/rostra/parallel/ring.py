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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from rostra.batch import Batch
from rostra.models.attention import Pattern
from rostra.parallel.context import Context, as_computed, expect, refusal, shared_fields

NAME = "rostra_ring"

_ROWS, _KEYS = 256, 1024  # of a block of scores, at most
_HIDDEN = -1e30  # the score of a key that is not seen; finite, so that no row becomes NaN


def split_ring(model: PreTrainedModel, group: dist.ProcessGroup | DeviceMesh) -> Ring:
    """Make `model` compute two chunks of each sample's positions on every rank of `group`.

    As `split_context`, but for the attention kernel that was asked for: ring attention takes its
    place. Layers that are compiled have a break of their graph around it. Raises RequestError
    for a model whose attention cannot be split so.
    """
    shared = shared_fields(model, group)
    AttentionInterface.register(NAME, _ring_attention)
    AttentionMaskInterface.register(NAME, first_keys)
    model.set_attn_implementation(NAME)
    return Ring(**shared, config=model.config)


@dataclass(frozen=True, eq=False)
class Ring(Context):
    """The ranks among which keys and values go around: from each to the next."""

    def part(self, positions: Tensor) -> Tensor:
        """The two chunks of this rank [samples, T / size] of a batch's tensor [samples, T]."""
        chunks = positions.chunk(2 * self.size, 1)
        return torch.cat([chunks[place] for place in self.places(self.rank)], 1)

    def inputs(self, batch: Batch, isolate: bool) -> dict[str, Any]:
        """As of a `Context`; the mask is the first key that each query of this rank sees."""
        inputs = super().inputs(batch, isolate)

        def own(mask: Tensor) -> Tensor:
            if mask.dtype != torch.int32:
                raise refusal(self.size, "this model looks ahead of a position", other="ulysses")
            return mask if mask.numel() == 1 else self.part(mask.flatten(1))[:, None, :, None]

        return inputs | {"attention_mask": tree_map(own, inputs["attention_mask"])}

    def places(self, rank: int) -> tuple[int, int]:
        """Which chunks of a sample `rank` has, in their order."""
        return rank, 2 * self.size - 1 - rank

    def blocks(self, source: int, length: int, window: int | None) -> Iterator[Block]:
        """What this rank's queries see of the keys of `source`; each has `length` of both."""
        spans = [list(self._spans(*x, length // 2)) for x in ((self.rank, _ROWS), (source, _KEYS))]
        for (rows, queries), (columns, keys) in product(*spans):
            past = window is not None and keys[-1] <= queries[0] - window
            if keys[0] <= queries[-1] and not past:
                yield Block(rows, columns, queries, keys)

    def _spans(self, rank: int, most: int, chunk: int) -> Iterator[tuple[slice, range]]:
        """Runs of at most `most` positions of a rank: where it has them, and which they are."""
        for half, place in enumerate(self.places(rank)):
            for start in range(0, chunk, most):
                end = min(start + most, chunk)
                shift = place * chunk
                yield (
                    slice(half * chunk + start, half * chunk + end),
                    range(shift + start, shift + end),
                )

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


@dataclass(frozen=True)
class Block:
    """Queries and keys that are multiplied at once: where their ranks have them, and which
    positions of the sample they are."""

    rows: slice
    columns: slice
    queries: range
    keys: range

    def hide(self, scores: Tensor, first: Tensor | None, window: int | None) -> Tensor:
        """`scores` [b, key heads, group, queries, keys], low where a key is not seen."""
        queries, keys = self.queries, self.keys
        near = window is None or keys[0] > queries[-1] - window
        if keys[-1] <= queries[0] and first is None and near:
            return scores
        at = torch.arange(queries.start, queries.stop, device=scores.device, dtype=torch.int32)
        key = torch.arange(keys.start, keys.stop, device=scores.device, dtype=torch.int32)
        seen = key <= at[:, None]
        if first is not None:
            seen = seen & (key >= first[:, :, None, self.rows])
        elif not near and window is not None:
            seen = seen & (key > at[:, None] - window)
        return torch.where(seen, scores, _HIDDEN)


def first_keys(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The first key that each query sees, int32 [batch, 1, T, 1], as transformers asks for masks.

    What a query sees (its document, a window, a chunk) is an unbroken row of keys that ends with
    itself, so its begin is found by halving: in T log T, never with a mask of T x T. Of a plain
    causal mask it is a single 0 [1, 1, 1, 1]; of one that looks ahead, what no ring takes: bool.
    """
    if mask_function is causal_mask_function:
        return torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    sample = torch.arange(batch_size, device=device)[:, None]
    query = torch.arange(q_length, device=device)[None].expand(batch_size, -1)
    head = torch.zeros_like(sample)
    ahead = (query + 1).clamp(max=kv_length - 1)
    if use_vmap or bool((mask_function(sample, head, query, ahead) & (ahead > query)).any()):
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    low, high = torch.zeros_like(query), query  # the first key seen lies from low to high
    for _ in range(q_length.bit_length()):
        middle = (low + high) // 2
        seen = mask_function(sample, head, query, middle)
        low, high = torch.where(seen, low, middle + 1), torch.where(seen, middle, high)
    return high.int()[:, None, :, None]


@torch.compiler.disable
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
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
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
        self.top = torch.full_like(self.out[..., :1], _HIDDEN)
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
            for block in ring.blocks(source, query.shape[3], pattern.window):
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
        pattern, ring = ctx.pattern, ctx.ring
        grad = grad.to(query.dtype)
        delta = (grad.to(sums.dtype) * out.to(sums.dtype)).sum(-1, keepdim=True)
        dquery = torch.zeros_like(query, dtype=sums.dtype)
        own: tuple[Tensor, ...] = ()
        behind: Passing | None = None
        for source, (keys, values) in ring.around(key, value):
            found = [torch.zeros_like(x, dtype=sums.dtype) for x in (keys, values)]
            for block in ring.blocks(source, query.shape[3], pattern.window):
                scores, bent = _scores(query, keys, first, pattern, block)
                rows, columns = block.rows, block.columns
                weights = torch.exp(scores - sums[:, :, :, rows])
                grads = grad[:, :, :, rows]
                dscores = _times(grads, values[:, :, columns].mT) - delta[:, :, :, rows]
                dscores = dscores * weights * pattern.scale
                if bent is not None:
                    dscores = dscores * (1 - bent * bent)
                dscores, weights = dscores.to(query.dtype), weights.to(query.dtype)
                dquery[:, :, :, rows] += _times(dscores, keys[:, :, columns])
                found[0][:, :, columns] += _summed(dscores, query[:, :, :, rows])
                found[1][:, :, columns] += _summed(weights, grads)
            if source == ring.rank:
                own = tuple(found)
                continue
            if behind is not None:
                found = [x + more for x, more in zip(found, behind.wait(), strict=True)]
            behind = ring.pass_on(*found)
        if behind is not None:
            own = tuple(x + more for x, more in zip(own, behind.wait(), strict=True))
        dkey, dvalue = (x.to(query.dtype) for x in own)
        return dquery.to(query.dtype), dkey, dvalue, None, None, None


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
