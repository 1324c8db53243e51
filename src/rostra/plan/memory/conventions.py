"""What a trainer holds, where trainers differ: so that measurements of another one can be set
beside these formulas."""

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
    half_stream: bool = False  # what flows between layers is in the type of products
    half_around: bool = False  # embedding, norm and head are gathered in the type of products too
    half_gathers: bool = False  # linears computed in fp8 are gathered in it
    every_other: bool = False  # selective:operations keeps every second matrix product
    holds_last: bool = False  # the last layer stays gathered from the forward pass on
    holds_layers: bool = False  # in a pipeline, all layers do


ROSTRA = Conventions()
TORCHTITAN = Conventions(
    logits="whole",
    half_stream=True,
    half_around=True,
    half_gathers=True,
    every_other=True,
    holds_last=True,
    holds_layers=True,
)
