"""What decides what a layer keeps: what of its family its matrices do not tell, and what it runs
under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rostra.plan.memory.growth import TOKENS

Kernel = Literal["flash", "masked", "blocked", "eager", "ring"]
ATTENTION = ("attn", "attention")  # in the names of its linears


@dataclass(frozen=True)
class Style:
    """What of a family its linears do not tell."""

    norm: Literal["rms", "gemma", "layer"] = "rms"
    after: bool = False  # norms after attention and MLP too
    heads: bool = False  # norms of queries and keys
    rotary: bool = True
    activation: Literal["one", "new_gelu"] = "one"  # operation


STYLES = {
    "llama": Style(),
    "mistral": Style(),
    "qwen2": Style(),
    "qwen3": Style(heads=True),
    "gemma3_text": Style("gemma", after=True, heads=True),
    "gpt2": Style("layer", rotary=False, activation="new_gelu"),
}
FLOAT = 4
UNKNOWN = Style("layer")


@dataclass(frozen=True)
class Adapted:
    """What an adapter adds to the linears that it goes around."""

    kind: Literal["none", "lora", "ia3", "prompt", "prefix"] = "none"
    names: frozenset[str] = frozenset()  # of linears in a layer
    rank: int = 0
    dora: bool = False


@dataclass(frozen=True)
class Setting:
    """What a layer runs under, on one rank."""

    length: int  # positions of a sample
    context: int = 1  # ranks that split them
    tensor: int = 1  # ranks that split the matrices, and the positions between blocks
    stream: int = 4  # bytes of a number between layers
    product: int = 4  # and of what products take
    weight: int = 4  # of a weight where products find it, and of its gradient there
    copies: bool = False  # autocast makes weights 16-bit
    keeps_copies: bool = True  # and keeps the copies to the end of the forward pass
    recasts: bool = False  # the backward pass makes the copies again: cast_at_each_use
    trains: bool = True  # the layer's own weights
    quantized: frozenset[str] = frozenset()  # linears whose weight is made anew
    adapted: Adapted = Adapted()
    kernel: Kernel = "flash"
    wide_powers: bool = False  # autocast computes powers in float32, as on GPUs
    every_other: bool = False  # of products, every second is dear
    tokens: complex = TOKENS
