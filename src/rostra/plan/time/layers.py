"""Seconds that one device computes on a micro batch: a layer forward, backward and again, and
what stands around the layers."""

from __future__ import annotations

from dataclasses import dataclass

from rostra.build.stages import loss_chunk
from rostra.hardware.cluster import Device
from rostra.layout import Layout
from rostra.parallel.activations import PARTS
from rostra.plan.conventions import Conventions
from rostra.plan.efficiency import Efficiency
from rostra.plan.job import Job, Layer
from rostra.plan.memory.growth import at
from rostra.plan.memory.working import Working
from rostra.plan.time.attention import AttentionTimes
from rostra.plan.time.kernels import PRODUCTS, Kernels
from rostra.plan.time.work import Bytes, Product, Work

STORED = {"nf4": 0.52, "fp4": 0.52, "int8": 1.01}  # bytes of a quantised number, with its scales
# Bytes for a logit between the head's products: `optim.losses`, by operations or compiled.
LOGIT, FUSED_LOGIT = 56, 12
SUMMED = 10  # bytes for a number of the head's gradient, each time that a chunk adds to it
# Bytes for a number that is scaled and rounded to 8 bits: its largest value, then the cast; by
# operations, compiled, or in one kernel that writes it twice, as it is and transposed.
ROUND, COMPILED_ROUND, FUSED_ROUND = 9, 5, 4


@dataclass(frozen=True)
class Pass:
    """What a pass through a layer takes: seconds of products with attention, seconds of
    pointwise work, and the host's seconds of starting them."""

    products: float = 0.0
    memory: float = 0.0
    launch: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.products + other.products, self.memory + other.memory, self.launch + other.launch
        )

    def __mul__(self, times: float) -> Pass:
        return Pass(self.products * times, self.memory * times, self.launch * times)

    @property
    def device(self) -> float:
        return self.products + self.memory

    def late(self, ahead: bool) -> float:
        """Seconds that starting its operations adds: where the host runs `ahead`, only those by
        which it is the slower of the two."""
        return max(0.0, self.launch - self.device) if ahead else self.launch


@dataclass(frozen=True)
class Micro:
    """A micro batch: the average layer of the model, and what stands around the layers."""

    forward: Pass
    backward: Pass  # without what is computed again
    again: Pass
    around: Pass  # embedding, head and loss, forward and backward
    weights: float  # seconds of `backward` for gradients of weights
    scores: float  # seconds of `forward` for attention
    saved: float  # bytes of a layer that wait on the host for its backward pass

    @property
    def device(self) -> float:
        return self.forward.device + self.backward.device + self.again.device

    def late(self, ahead: bool) -> float:
        return self.forward.late(ahead) + (self.backward + self.again).late(ahead)


def stream_bytes(layout: Layout, conventions: Conventions) -> int:
    """Of a number between layers: autocast over float32 weights leaves it float32."""
    return 2 if conventions.half_stream or layout.compute == "bf16_pure" else 4


class LayerTimes:
    """The seconds of a micro batch under a layout, without communication."""

    def __init__(
        self, job: Job, device: Device, efficiency: Efficiency, conventions: Conventions
    ) -> None:
        self.job, self.efficiency, self.conventions = job, efficiency, conventions
        self.on_gpu = device.kind == "gpu"
        self.work = Work(job, conventions)
        self.kernels = Kernels(device, efficiency)
        self.attention = AttentionTimes(job, device, efficiency, conventions)
        self._working = Working(job, device.kind, conventions)

    def __call__(self, layout: Layout) -> Micro:
        sizes = self.job.sizes
        micro = Micro(Pass(), Pass(), Pass(), self._around(layout), 0.0, 0.0, 0.0)
        for layer, count in sizes.layers:
            one, share = self._layer(layer, layout), count / sizes.depth
            micro = Micro(
                micro.forward + one.forward * share,
                micro.backward + one.backward * share,
                micro.again + one.again * share,
                micro.around,
                micro.weights + one.weights * share,
                micro.scores + one.scores * share,
                micro.saved + one.saved * share,
            )
        return micro

    def _layer(self, layer: Layer, layout: Layout) -> Micro:
        rows = layout.micro_batch * self.job.length / layout.context
        products = self.work.products(layer, layout.tensor)
        parts = {part: self._products(rows, products, part, layout) for part in PARTS}
        linear, scores = sum(parts.values()), self.attention(layer, layout)
        moved = self._pointwise(layer, rows, products, layout)
        extra, more = self._adapter(rows, products, layout)
        weights = linear if layout.adapter == "none" else extra
        launch = self.efficiency.launch * (self.work.launches(layer, layout.compile) + more)
        forward = Pass(linear + scores[0] + extra, self.kernels.moved(moved.forward), launch)
        backward = Pass(
            linear + weights + scores[1] + extra, self.kernels.moved(moved.backward), 2 * launch
        )
        lasts = {
            part: self._products(
                rows, tuple(x for x in products if x.part == part)[-1:], part, layout
            )
            for part in PARTS
        }
        again = self._again(layout, forward, parts, scores[0], lasts)
        saved = 0.0
        if layout.activation_checkpointing == "offload":
            kept = self._working.profile(layout, layer, again=True, first=False)
            saved = at(kept.kept - kept.copies, self._working.tokens(layout))
        return Micro(forward, backward, again, Pass(), weights, scores[0], saved)

    def _products(
        self, rows: float, products: tuple[Product, ...], part: str, layout: Layout
    ) -> float:
        precision = PRODUCTS[layout.compute]
        return sum(
            x.times * self.kernels.product(rows * x.share, x.inputs, x.outputs, precision)
            for x in products
            if x.part == part
        )

    def _pointwise(
        self, layer: Layer, rows: float, products: tuple[Product, ...], layout: Layout
    ) -> Bytes:
        computed = 4 if layout.compute == "fp32" else 2
        one = self.work.pointwise(
            layer, layout.tensor, stream_bytes(layout, self.conventions), computed, layout.compile
        )
        forward, backward = rows * one.forward, rows * one.backward
        numbers = sum(x.inputs * x.outputs * x.times for x in products)
        if layout.quantization != "none":  # each use makes the 16-bit matrix anew
            dequantised = numbers * (STORED[layout.quantization] + computed)
            forward, backward = forward + dequantised, backward + dequantised
        if layout.compute == "fp8":
            each = COMPILED_ROUND if layout.compile else ROUND
            each = FUSED_ROUND if self.conventions.fused else each
            if self.conventions.half_gathers or self.conventions.fused:
                numbers = 0  # weights are rounded once a step
            into = rows * sum(x.inputs * x.times * x.share for x in products)
            out = rows * sum(x.outputs * x.times * x.share for x in products)
            forward += each * (into + numbers)
            backward += each * (into + out + numbers)
        return Bytes(forward, backward)

    def _adapter(
        self, rows: float, products: tuple[Product, ...], layout: Layout
    ) -> tuple[float, float]:
        """Seconds of LoRA's two thin products beside each matrix, and operations started."""
        if layout.adapter != "lora":
            return 0.0, 0.0
        rank, precision = self.job.config.adapter.rank, PRODUCTS[layout.compute]
        around = [x for x in products if x.adapted]
        seconds = sum(
            self.kernels.product(rows, x.inputs, rank, precision)
            + self.kernels.product(rows, rank, x.outputs, precision)
            + self.kernels.moved(6 * rows * x.outputs)
            for x in around
        )
        return seconds, 5.0 * len(around)

    def _again(
        self,
        layout: Layout,
        forward: Pass,
        parts: dict[str, float],
        scores: float,
        lasts: dict[str, float],
    ) -> Pass:
        """What activation checkpointing computes again (Chen et al. 2016, arXiv:1604.06174).
        PyTorch stops when the last saved tensor is there, before a block's last product."""
        kind, _, what = layout.activation_checkpointing.partition(":")
        if kind in ("none", "offload"):
            return Pass()
        if kind == "full":
            return Pass(forward.products - lasts["mlp"], forward.memory, forward.launch)
        if kind == "every":
            some = Pass(forward.products - lasts["mlp"], forward.memory, forward.launch)
            return some * (1 / int(what))
        half = Pass(0.0, forward.memory / 2, forward.launch / 2)
        if what == "mlp":
            return half + Pass(parts["mlp"] - lasts["mlp"])
        if what == "attention":
            return half + Pass(parts["attention"] - lasts["attention"] + scores)
        products = sum(parts.values()) / 2 if self.conventions.every_other else 0.0
        return Pass(products, forward.memory, forward.launch)

    def _around(self, layout: Layout) -> Pass:
        """Embedding, head and loss. A frozen head has no gradient of its weight; of others it is
        summed up chunk by chunk."""
        sizes, stream = self.job.sizes, stream_bytes(layout, self.conventions)
        rows = layout.micro_batch * self.job.length / layout.context
        columns, trained = sizes.vocabulary / layout.tensor, layout.adapter == "none"
        asked = self.job.config.train.loss_chunk or loss_chunk(sizes.vocabulary, self.on_gpu)
        chunk = rows if self.conventions.logits != "chunked" else min(rows, asked)
        chunks, precision = rows / chunk, PRODUCTS[layout.compute]
        precision = "bf16" if precision == "fp8" else precision
        products = 2 * self.kernels.product(chunk, sizes.hidden, columns, precision)
        if trained:
            products += self.kernels.product(columns, chunk, sizes.hidden, precision)
        fused = layout.compile or self.conventions.fused
        moved = rows * columns * (FUSED_LOGIT if fused else LOGIT) / self.efficiency.loss
        moved += rows * sizes.hidden * stream * 5
        if trained:  # the embedding's dense gradient, and the sum of the head's
            moved += (8 + SUMMED * (chunks > 1) * chunks) * columns * sizes.hidden
        launch = self.efficiency.launch * (40 + 20 * chunks)
        return Pass(chunks * products, self.kernels.moved(moved), launch)
