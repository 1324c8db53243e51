"""What a layer has to do for one row (a position of a sample): its matrix products, the pairs
of attention, the bytes of pointwise work, the operations that are started."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rostra.models.experts import experts_of
from rostra.parallel.activations import PARTS
from rostra.plan.conventions import Conventions
from rostra.plan.job import Job, Layer, Linear

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
        self.experts, self.active = experts_of(text)
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
        table = self.job.config.adapter
        return table.all_linear or table.aims_at(f"model.layers.0.{name}")

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
        sizes, linears = self.job.sizes, layer.linears
        blocks = [self._block(len(x) - 1, stream, computed, merged) for x in self._parts(layer)]
        rotated = (sizes.heads + sizes.kv_heads) * sizes.head_size
        turn, act = self._turn(stream, computed, merged), self._act(computed, merged)
        small = self._norm(computed, merged) if self._head_norms(layer) else (0, 0)
        more = max(0, self._norms(layer) - 2)  # norms behind the blocks too
        biased = sum(x.outputs for x in linears if x.bias)  # their gradients: sums over rows
        forward, backward = (
            sizes.hidden * (sum(x[i] for x in blocks) + more * self._norm(stream, merged)[i])
            + rotated * (turn[i] * self.rotary + small[i])
            + act[i] * self.inner(layer)
            for i in range(2)
        )
        repeated = 3 * stream * sizes.heads * sizes.head_size * self._repeats(merged)
        return Bytes(
            (forward + repeated) / tensor, (backward + repeated + computed * biased) / tensor
        )

    def _block(self, readers: int, stream: int, computed: int, merged: bool) -> tuple[float, float]:
        """Forward and backward, for a number of the hidden states: residual and norm before a
        block, and what autocast casts for, and sums from, the `readers` of the norm."""
        norm = self._norm(stream, merged)
        if merged:
            return norm[0] + 2 * computed, norm[1] + (1 + readers) * computed
        cast = stream + computed if stream != computed else 0
        joined = 1 if self.conventions.fused else readers
        forward = norm[0] + 2 * stream + computed + joined * cast
        return forward, norm[1] + 3 * stream * joined + (1 + joined) * cast

    def _norm(self, stream: int, merged: bool) -> tuple[int, int]:
        """Forward and backward, for a number that is normalised: one kernel each, whose gradients
        of scale and bias read its inputs again; or an RMSNorm of six operations in float32."""
        if merged:
            return 2 * stream, 3 * stream
        if self.conventions.fused or not self.rms:
            return 2 * stream, 5 * stream
        return (28, 92) if stream == 4 else (36, 104)

    def _turn(self, stream: int, computed: int, merged: bool) -> tuple[int, int]:
        """Forward and backward, for a number that is rotated: four operations, in float32 where
        the stream is."""
        if merged or self.conventions.fused:
            return 2 * computed, 2 * computed
        return (36, 54) if stream != computed else (10 * computed, 14 * computed)

    def _act(self, computed: int, merged: bool) -> tuple[int, int]:
        """Forward and backward, for a number inside the MLP."""
        if self.gated:
            return (3 * computed, 6 * computed) if merged else (5 * computed, 9 * computed)
        if self.stepwise and not merged:
            return 18 * computed, 30 * computed
        return 2 * computed, 3 * computed

    def _parts(self, layer: Layer) -> list[list[Linear]]:
        """Linear layers of attention and of the MLP; the last of each reads no norm."""
        inside = [x.name.split(".")[0] in PARTS["attention"] for x in layer.linears]
        return [
            [x for x, here in zip(layer.linears, inside, strict=True) if here == attention]
            or [layer.linears[0]] * 2
            for attention in (True, False)
        ]

    def _norms(self, layer: Layer) -> int:
        known = self.rms and not self.experts
        return max(2, layer.other // self.job.sizes.hidden) if known else 2

    def _head_norms(self, layer: Layer) -> bool:
        """Whether queries and keys are normalised head by head."""
        rest = layer.other - self._norms(layer) * self.job.sizes.hidden
        return self.rms and not self.experts and rest > 0

    def _repeats(self, merged: bool) -> bool:
        """Whether shared keys and values are repeated for all heads: PyTorch's attention with a
        mask does not share them."""
        shared = self.job.sizes.kv_heads < self.job.sizes.heads
        return shared and self.job.config.data.isolate_documents and not merged

    def launches(self, layer: Layer, fused: bool) -> float:
        """Operations that a layer's forward pass starts; a backward pass starts twice as many."""
        products = len(layer.linears) + 3 * bool(self._experts(layer))
        if fused:
            return products + 6
        norms = (self._norms(layer) + 2 * self._head_norms(layer)) * (7 if self.rms else 1)
        casts = 0 if self.conventions.half_stream else products
        act = 3 if self.gated else 9 if self.stepwise else 1
        return products + casts + norms + 12 * self.rotary + act + 8
