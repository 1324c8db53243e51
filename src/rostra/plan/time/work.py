"""What a layer has to do for one row (a position of a sample): its matrix products, the pairs
of attention, the bytes of pointwise work, the operations that are started."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rostra.parallel.activations import PARTS
from rostra.plan.efficiency import Conventions
from rostra.plan.job import Job, Layer

Part = Literal["attention", "mlp"]


@dataclass(frozen=True)
class Product:
    """A row times a matrix of `inputs` x `outputs`; of `times` alike (experts), each row meets
    the part `share`."""

    inputs: int
    outputs: int
    part: Part
    adapted: bool = True  # an adapter goes around it
    times: int = 1
    share: float = 1.0

    @property
    def operations(self) -> float:
        return 2.0 * self.inputs * self.outputs * self.times * self.share


@dataclass(frozen=True)
class Bytes:
    """Moved for a row by what is neither matrix product nor attention, in each direction."""

    forward: float
    backward: float


class Work:
    """The work of a job's layers."""

    def __init__(self, job: Job, conventions: Conventions) -> None:
        self.job, self.conventions = job, conventions
        text = job.shape.get_text_config()
        self.experts = getattr(text, "num_local_experts", 0) or getattr(text, "num_experts", 0) or 0
        self.active = getattr(text, "num_experts_per_tok", 0) or 0
        self.expert_size = getattr(text, "moe_intermediate_size", 0) or job.sizes.intermediate
        self.rms = getattr(text, "rms_norm_eps", None) is not None
        named = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None)
        self.stepwise = named in ("gelu_new", "gelu_fast")  # eight operations in transformers
        self.rotary = bool(getattr(text, "rope_parameters", None))

    def products(self, layer: Layer, tensor: int) -> tuple[Product, ...]:
        """The matrices of a layer as one of `tensor` ranks has them."""
        found = []
        for linear in layer.linears:
            inputs, outputs = linear.inputs, linear.outputs
            if linear.cut == "columns":
                outputs = -(-outputs // tensor)
            elif linear.cut == "rows":
                inputs = -(-inputs // tensor)
            mlp = linear.name.split(".")[0] not in PARTS["attention"]
            part: Part = "mlp" if mlp else "attention"
            found.append(Product(inputs, outputs, part, self._adapted(linear.name)))
        return (*found, *self._experts(layer))

    def _adapted(self, name: str) -> bool:
        """Whether the config's adapter goes around the linear layer `name`."""
        targets = self.job.config.adapter.targets
        if targets is None or targets == "all-linear":
            return True
        if isinstance(targets, str):
            return re.search(rf"(?:^|\.)(?:{targets})$", name) is not None
        return any(name == x or name.endswith(f".{x}") for x in targets)

    def _experts(self, layer: Layer) -> tuple[Product, ...]:
        """Fused experts are no linear layers: three matrices each, of which a row meets few."""
        hidden, size = self.job.sizes.hidden, self.expert_size
        if not self.experts or layer.other < self.experts * hidden * size:
            return ()
        share = self.active / self.experts
        up = Product(hidden, size, "mlp", False, self.experts, share)
        down = Product(size, hidden, "mlp", False, self.experts, share)
        return (up, up, down)

    def pairs(self, layer: Layer, length: int) -> float:
        """Pairs of a query and a key that it sees, in one sample: the causal half, or the band
        of a sliding window."""
        window = min(layer.window or length, length)
        return window * length - window * window / 2

    @cached_property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections (SwiGLU: Shazeer 2020, arXiv:2002.05202)."""
        layer = self.job.sizes.layers[0][0]
        out = sum(p.outputs * p.times for p in self.products(layer, 1) if p.part == "mlp")
        into = sum(p.inputs * p.times for p in self.products(layer, 1) if p.part == "mlp")
        return out > into

    def inner(self, layer: Layer) -> float:
        """Numbers of a row inside the MLP, after its activation."""
        if self._experts(layer):
            return self.active * self.expert_size
        return max((x.inputs for x in layer.linears), default=self.job.sizes.intermediate)

    def pointwise(
        self, layer: Layer, tensor: int, stream: int, computed: int, merged: bool
    ) -> Bytes:
        """Bytes for a row, counting each tensor that an operation reads or writes.

        `stream` bytes have numbers between the blocks (residuals, norms), `computed` those
        inside. Under torch.compile all that stands between two products is `merged`: read once
        and written once.
        """
        sizes, computed_norm = self.job.sizes, 2 * computed
        own = self.conventions.fused  # norms and rotary embeddings have kernels of their own
        residual = 3 * stream
        if merged:
            norm = (2 * stream + computed_norm, 3 * stream + computed_norm)
        elif own or not self.rms:  # the gradients of scale and bias read their inputs again
            norm = (2 * stream + residual, 5 * stream + residual)
        else:  # six operations in float32
            norm = (28 + 4 * (stream == 2) + residual, 56 + 8 * (stream == 2) + residual)
        gate = (3, 6) if merged else (5, 9)
        turn = (2, 2) if merged or own else (8, 10)
        act = gate if self.gated else (18, 30) if self.stepwise and not merged else (2, 3)
        cast = 0.0  # of what the products read, by autocast
        if stream != computed and not merged:
            cast = (stream + computed) * sum(x.inputs == sizes.hidden for x in layer.linears)
        biased = sum(x.outputs for x in layer.linears if x.bias)  # their gradients: sums over rows
        rotated = (sizes.heads + sizes.kv_heads) * sizes.head_size * self.rotary
        inner = self.inner(layer)
        forward, backward = (
            sizes.hidden * (2 * norm[i] + cast) + computed * (act[i] * inner + turn[i] * rotated)
            for i in range(2)
        )
        return Bytes(forward / tensor, (backward + computed * biased) / tensor)

    def launches(self, layer: Layer, fused: bool) -> float:
        """Operations that a layer's forward pass starts; a backward pass starts twice as many."""
        products = len(layer.linears) + 3 * bool(self._experts(layer))
        if fused:
            return products + 6
        norms = 2 * (7 if self.rms else 1)
        casts = products if self.conventions.stream_bytes is None else 0
        return (
            products
            + casts
            + norms
            + 12 * self.rotary
            + (3 if self.gated else 1)
            + 8 * self.stepwise
            + 8
        )
