"""What stands between the matrix products of a real model: norms, rotations, activations, casts,
residuals, the loss; measured on layers of transformers whose products and attention are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from rostra.optim import chunked_cross_entropy
from rostra.plan.calibrate.compute import DTYPES, Bench
from rostra.plan.calibrate.figure import Figure
from rostra.plan.calibrate.values import BETWEEN

NOTHING = "rostra_nothing"  # attention that computes nothing
ROWS = (16, 128, 512, 2048, 8192, 32768)


def between(bench: Bench, precision: str) -> Iterator[Figure]:
    """A decoder layer forward and backward without its products, by rows; `amount` are rows."""
    AttentionInterface.register(NOTHING, _no_attention)
    shape = layer_shape()
    layer = LlamaDecoderLayer(shape, 0).to(bench.device)
    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, _NoProduct(child))
    turn = LlamaRotaryEmbedding(shape).to(bench.device)
    dtype = DTYPES[precision]
    for rows in [rows for rows in ROWS if rows <= bench.most >> 18]:
        x = bench.random(1, rows, shape.hidden_size).requires_grad_()
        angles = turn(x, torch.arange(rows, device=bench.device)[None])
        gradient = torch.ones_like(x)

        def run(x: Tensor = x, angles: Any = angles, gradient: Tensor = gradient) -> None:
            with torch.autocast(bench.device.type, dtype, enabled=precision != "fp32"):
                out = layer(x, position_embeddings=angles)
            (out if isinstance(out, Tensor) else out[0]).backward(gradient)

        yield bench.figure("between", precision, (rows,), rows, run)


def layer_shape() -> LlamaConfig:
    """The layer that is measured."""
    shape = LlamaConfig(**BETWEEN)
    shape._attn_implementation = NOTHING
    return shape


def loss(bench: Bench, precision: str) -> Figure:
    """The loss between the head's products, forward and backward; `amount` are logits."""
    rows, width, dtype = min(1024, bench.most >> 18), 16, DTYPES[precision]
    vocabulary = 8192 if bench.device.type == "cpu" else 65536  # enough work for each operation
    hidden = bench.random(rows, width, dtype=dtype).requires_grad_()
    weight = bench.random(vocabulary, width, dtype=dtype).requires_grad_()
    labels = torch.arange(rows, device=bench.device)

    def run() -> None:
        chunked_cross_entropy(hidden, weight, labels, chunk=1024)[0].backward()

    return bench.figure("loss", precision, (rows, vocabulary), rows * vocabulary, run)


class _NoProduct(nn.Module):
    """In place of a linear layer: casts as it does, and gives ones."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs = linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return _Nothing.apply((*x.shape[:-1], self.outputs), x)


def _no_attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    batch, heads, length, size = q.shape
    return _Nothing.apply((batch, length, heads, size), q, k, v), None


class _Nothing(torch.autograd.Function):
    """Ones of a shape, whatever goes in; and ones for the gradients."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
        ctx.like = [(tuple(x.shape), x.dtype, x.device) for x in inputs]
        return _ones(shape, inputs[0].dtype, inputs[0].device).detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *(_ones(*like).detach() for like in ctx.like)


@cache
def _ones(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)
