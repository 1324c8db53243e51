"""Which keys the queries of a rank see in ring attention: by blocks, and within a block.

A sample is cut into 2c chunks, of which rank r of c has two, r and 2c-1-r (see `ring.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

HIDDEN = -1e30  # the score of a key that is not seen; finite, so that no row becomes NaN


def places(size: int, rank: int) -> tuple[int, int]:
    """Which chunks of a sample `rank` has, in their order."""
    return rank, 2 * size - 1 - rank


@dataclass(frozen=True)
class Block:
    """Queries and keys that are multiplied at once: where their ranks have them, and which
    positions of the sample they are."""

    rows: slice
    columns: slice
    queries: range
    keys: range

    def hide(self, scores: Tensor, first: Tensor | None, window: int | None) -> Tensor:
        """`scores` [b, key heads, group, queries, keys], low where a key is not seen.

        `first` [b, 1, T / size, 1] has the first key that each query of the rank sees; without
        it, a `window` tells, if any.
        """
        queries, keys = self.queries, self.keys
        near = window is None or keys[0] > queries[-1] - window
        if keys[-1] <= queries[0] and first is None and near:
            return scores
        at = torch.arange(queries.start, queries.stop, device=scores.device, dtype=torch.int32)
        key = torch.arange(keys.start, keys.stop, device=scores.device, dtype=torch.int32)
        seen = key <= at[:, None]
        if first is not None:
            seen = seen & (key >= first[:, :, None, self.rows])
        elif window is not None:
            seen = seen & (key > at[:, None] - window)
        return torch.where(seen, scores, HIDDEN)


def seen_blocks(
    size: int, rank: int, source: int, length: int, window: int | None, most: int
) -> Iterator[Block]:
    """The blocks, of at most `most` queries and keys, of `rank` and `source` in which a key is
    seen.

    Each rank has `length` positions; a query sees itself and what is before it, of that
    no more than `window` keys. Where documents end is not looked at.
    """
    spans = (_spans(places(size, x), length // 2, most) for x in (rank, source))
    for (rows, queries), (columns, keys) in product(*spans):
        past = window is not None and keys[-1] <= queries[0] - window
        if keys[0] <= queries[-1] and not past:
            yield Block(rows, columns, queries, keys)


def _spans(chunks: tuple[int, int], chunk: int, most: int) -> Iterator[tuple[slice, range]]:
    """Runs of at most `most` positions: where the rank has them, and which they are."""
    for half, place in enumerate(chunks):
        for start in range(0, chunk, most):
            end = min(start + most, chunk)
            own, whole = half * chunk, place * chunk
            yield slice(own + start, own + end), range(whole + start, whole + end)


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
    union = getattr(mask_function, "__name__", "") == "or_mask"  # transformers' name
    if use_vmap or union or "allow_is_bidirectional_skip" in kwargs:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    sample = torch.arange(batch_size, device=device)[:, None]
    query = torch.arange(q_length, device=device)[None].expand(batch_size, -1)
    head = torch.zeros_like(sample)
    low, high = torch.zeros_like(query), query  # the first key seen lies from low to high
    for _ in range(q_length.bit_length()):
        middle = (low + high) // 2
        seen = mask_function(sample, head, query, middle)
        low, high = torch.where(seen, low, middle + 1), torch.where(seen, middle, high)
    return high.int()[:, None, :, None]
