"""Seconds of attention: fused kernels, batch products by blocks, or all scores written out."""

from __future__ import annotations

from math import log2

from rostra.hardware.cluster import Device
from rostra.layout import Layout
from rostra.plan.conventions import Conventions
from rostra.plan.efficiency import Efficiency
from rostra.plan.job import Job, Layer
from rostra.plan.time.kernels import PRODUCTS, Kernels
from rostra.plan.time.work import Work

# FlashAttention and, on Hopper, FlashAttention-3 (and cuDNN's) beside FlashAttention-2: Dao 2023,
# arXiv:2307.08691, figure 4; Shah et al. 2024, arXiv:2407.08608, figures 5 and 6.
FUSED = {"flash1": 0.55, "flash": 1.0, "flash3": 1.6}
# Bytes for a score that is written out, forward and backward: scaling, mask, softmax and their
# gradients by operations of their own, in one kernel, or, in blocks, in float32.
SCORE, FUSED_SCORE, BLOCK_SCORE = (16, 20), (6, 8), (40, 60)
BLOCK = 1024  # queries and keys that are multiplied at once by blocks
# Compiled attention by blocks, on CPUs. Forward: a score is read twice in float32 (for the largest,
# and for its exponential) and written in 16 bits; backward it and its gradient are read and
# written. An exponential takes about as long as moving 10 bytes.
COMPILED_SCORE = (20, 28)


class AttentionTimes:
    """Called with a layer and a layout, gives the seconds of a layer's attention on a micro
    batch, forward and backward."""

    def __init__(
        self, job: Job, device: Device, efficiency: Efficiency, conventions: Conventions
    ) -> None:
        self.job, self.efficiency, self.conventions = job, efficiency, conventions
        self.on_gpu = device.kind == "gpu"
        self.kernels = Kernels(device, efficiency)
        self.work = Work(job, conventions)

    def __call__(self, layer: Layer, layout: Layout) -> tuple[float, float]:
        heads = layout.micro_batch * self.job.sizes.heads / layout.tensor / layout.context
        kind, precision = self._kind(layout), PRODUCTS[layout.compute]
        if kind == "materialised":
            moved = FUSED_SCORE if self.conventions.fused else SCORE
            return self._scores(heads * self.job.length**2, self.job.length, moved, precision)
        if kind == "compiled":
            rows = max(128, self.job.length // 16)  # as `models.attention` has them
            pairs = heads * (self.work.pairs(layer, self.job.length) + self.job.length * rows / 2)
            return self._scores(pairs, self.job.length // 2, COMPILED_SCORE, precision)
        if kind == "blocks":
            seen = heads * self.work.pairs(layer, self.job.length)
            return self._scores(seen, min(BLOCK, self.job.length), BLOCK_SCORE, precision)
        return self._fused(layer, heads, FUSED[kind], precision)

    def _kind(self, layout: Layout) -> str:
        """The kernel: Rostra's ring computes by blocks on every device; what that takes on a CPU
        is measured as attention there. Compiled on a CPU, attention is by blocks too."""
        kind, asked = self.conventions.attention, self.job.config.model.attention
        ring = layout.context > 1 and layout.context_method == "ring"
        if ring and self.on_gpu and not self.conventions.fused_ring:
            return "blocks"
        if layout.compile and not self.on_gpu and asked in ("auto", "blocked"):
            return "compiled"
        return "materialised" if asked == "eager" and kind == "flash" else kind

    def _scores(
        self, pairs: float, wide: int, moved: tuple[int, int], precision: str
    ) -> tuple[float, float]:
        """With scores in memory: 2 products forward and 4 backward, of `wide` keys at once."""
        one = self.kernels.product(pairs / wide, self.job.sizes.head_size, wide, precision)
        forward, backward = (self.kernels.moved(pairs * each) for each in moved)
        return 2 * one + forward, 4 * one + backward

    def _fused(
        self, layer: Layer, heads: float, speed: float, precision: str
    ) -> tuple[float, float]:
        """2 products forward and 5 backward of the pairs that are seen: the kernel computes
        scores again (Dao et al. 2022, arXiv:2205.14135, algorithm 4). With a mask between
        documents another kernel computes all of them."""
        size, length = self.job.sizes.head_size, self.job.length
        masked = self.job.config.data.isolate_documents
        pairs = length**2 / 2 if masked else self.work.pairs(layer, length)
        operations = 4.0 * heads * pairs * size
        seconds = self.kernels.attention(operations, length, size, precision) / speed
        if masked:
            seconds /= self.efficiency.masked(log2(length))
        return seconds, 2.5 * seconds
