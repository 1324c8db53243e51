"""Habits of a trainer, where trainers differ and a layout does not say: what it holds, and how it
computes, so that measurements of another one can be set beside the plan's figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Logits = Literal["chunked", "whole", "fused"]


@dataclass(frozen=True)
class Conventions:
    """Rostra's own by default."""

    # Logits of a micro batch: some positions at a time; all at once in float32, the operations
    # of cross-entropy one by one; or these as a compiler fuses them.
    logits: Logits = "chunked"
    fused: bool = False  # norms, rotary embeddings, casts and losses in kernels of their own
    attention: Literal["flash", "flash1", "flash3", "materialised"] = "flash"
    fused_ring: bool = False  # the same in a ring of context parallelism, where Rostra has none
    half_stream: bool = False  # what flows between layers is in the type of products
    half_around: bool = False  # embedding, norm and head are gathered in the type of products too
    half_gathers: bool = False  # linears computed in fp8 are gathered in it
    copied_bytes: int | None = None  # for a parameter in a micro batch; None: as autocast does
    every_other: bool = False  # selective:operations keeps every second matrix product
    holds_last: bool = False  # the last layer stays gathered from the forward pass on
    holds_layers: bool = False  # in a pipeline, all layers do
    slices: bool = False  # stages hand on a tensor rank's slice of positions, not all of them
    # axes whose collectives go on beside computing: `tensor` in parts behind its products,
    # `pipeline` behind other micro batches, `shard` (zero1's gather) behind the next forward pass
    asynchronous: tuple[str, ...] = ()


ROSTRA = Conventions()
# FSDP2 with bf16 activations, gradients reduced in float32.
TORCHTITAN = Conventions(
    logits="whole",
    fused_ring=True,
    half_stream=True,
    half_around=True,
    half_gathers=True,
    every_other=True,
    holds_last=True,
    holds_layers=True,
    slices=True,
)
