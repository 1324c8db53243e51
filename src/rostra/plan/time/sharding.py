"""What ranks send each other of parameters and gradients, or fetch from their host, and how much
of it shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rostra.hardware.cluster import Cluster
from rostra.layout import SHARDED, Layout
from rostra.plan.conventions import Conventions
from rostra.plan.efficiency import Efficiency
from rostra.plan.job import Job
from rostra.plan.time.collectives import Group, group
from rostra.plan.time.flops import trainable
from rostra.plan.time.kernels import Kernels
from rostra.plan.time.layers import STORED

BUCKET = 25 * 2**20  # bytes of gradients that travel together under no_shard and zero1
REDUCED = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Shown:
    """Seconds of collectives of parameters and gradients, as far as they show and as far as they
    hide behind computing: of a micro batch, and of those that there are once a step."""

    micro: float = 0.0
    hidden: float = 0.0
    once: float = 0.0
    hidden_once: float = 0.0

    def seconds(self, contention: float) -> float:
        """That a micro batch takes longer: what shows, and what hidden ones slow."""
        return self.micro + contention * self.hidden


@dataclass(frozen=True)
class Sharding:
    """Seconds of the collectives of a rank's parameters, of fetching and of copying them."""

    copies: float  # of casts and copies of parameters and gradients, a micro batch
    gather: float = 0.0  # of a layer
    again: float = 0.0  # of a layer, for the backward pass
    fetch: float = 0.0  # of a rank's part of a layer, from the host or NVMe, before its gather
    fetch_again: float = 0.0
    reduce: float = 0.0  # of a layer's gradients
    root_gather: float = 0.0  # of all that is no layer
    root_reduce: float = 0.0
    once: float = 0.0  # of the gradients of a step, under no_shard and zero1
    last: float = 0.0  # of their last bucket, which nothing hides
    after: float = 0.0  # of the parameters that are gathered after the optimizer's step
    ahead: bool = False  # and go on in the next forward pass
    beside: bool = True  # gradients are reduced while others are computed

    def among_ranks(self) -> Sharding:
        """Without what comes from the host."""
        return replace(self, fetch=0.0, fetch_again=0.0)

    def shown(self, depth: float, forward: float, backward: float, pipeline: bool) -> Shown:
        """With `depth` layers that take `forward` and `backward` seconds.

        A layer's parameters are gathered while the one before computes, its gradients reduced
        while the next one does (Zhao et al. 2023, arXiv:2304.11277, section 3.3); in a pipeline
        they are reduced once. Of gradients that all ranks hold, buckets go while the backward
        pass makes more (Li et al. 2020, arXiv:2006.15704, section 3.2.3).
        """
        after = max(0.0, self.after - depth * forward) if self.ahead else self.after
        if self.once:
            shown = max(self.last, self.once - depth * backward * self.beside)
            return Shown(once=shown + after, hidden_once=self.once + self.after - shown - after)
        down, root = (0.0, 0.0) if pipeline else (self.reduce, self.root_reduce)
        gather, again = self.gather + self.fetch, self.again + self.fetch_again
        into = max(0.0, gather - forward) * (depth - 1) + gather + self.root_gather
        out = max(0.0, again + down - backward * self.beside) * depth + down + root
        total = depth * (gather + again + down) + self.root_gather + root
        once = depth * self.reduce + self.root_reduce if pipeline else 0.0
        return Shown(into + out, max(0.0, total - into - out), once + after)


class ShardingTimes:
    """Called with a Layout, gives its `Sharding`, as `docs/communication.md` counts it."""

    def __init__(
        self, job: Job, cluster: Cluster, efficiency: Efficiency, conventions: Conventions
    ) -> None:
        self.job, self.cluster = job, cluster
        self.efficiency, self.conventions = efficiency, conventions
        self.kernels = Kernels(cluster.device, efficiency)
        self.trained = trainable(job)
        sizes = job.sizes
        self.body = sum(x.numbers * count for x, count in sizes.layers)
        self.root = sizes.parameters - self.body

    def __call__(self, layout: Layout) -> Sharding:
        parts = layout.shard * layout.context
        frozen = layout.adapter != "none"
        layer = self.body / self.job.sizes.depth / layout.tensor
        trained = self.trained / self.job.sizes.depth / layout.tensor if frozen else layer
        # DeepSpeed's `overlap_comm` is on for ZeRO-3 alone
        beside = layout.engine == "torch" or layout.sharding == "full_shard"
        away = layout.offload_parameters != "none"
        sharded = layout.sharding in SHARDED and (parts > 1 or away)
        copied = self._copied(layout, layer, trained, sharded)
        copies = self.kernels.moved(copied * self.job.sizes.depth / layout.pipeline)
        back = REDUCED[layout.reduction]
        inner = layout.tensor * layout.expert
        within, across = self._group(parts, inner), self._group(layout.replicate, inner * parts)
        if not sharded:
            return replace(self._whole(layout, copies, back, within, across), beside=beside)
        root = self.root / layout.tensor
        reduce, root_reduce = (
            within.reduce_scatter(back * x) + across.all_reduce(back * x / parts)
            for x in (trained, root)
        )
        computed = 4 if layout.compute == "fp32" else 2
        if layout.engine == "deepspeed" and layout.sharding == "shard_grad_op":
            # its ZeRO-2 keeps 16-bit weights whole, and gathers them after the optimizer's step
            after = within.all_gather(computed * self.trained)
            return Sharding(
                copies, reduce=reduce, root_reduce=root_reduce, after=after, beside=beside
            )
        half = layout.compute == "fp8" and self.conventions.half_gathers
        wire = STORED.get(layout.quantization) or (1 if half else computed)
        gather = within.all_gather(wire * layer)
        held = wire if frozen or layout.engine == "deepspeed" else 4
        fetch = self._up(layout, held * layer / parts) if away else 0.0
        twice = layout.sharding != "shard_grad_op"
        return Sharding(
            copies,
            gather,
            again=gather * twice,
            fetch=fetch,
            fetch_again=fetch * twice,
            reduce=reduce,
            root_gather=within.all_gather(computed * root),
            root_reduce=0.0 if frozen else root_reduce,
        )

    def _up(self, layout: Layout, size: float) -> float:
        """Seconds in which a device's part of a layer comes from the host, or from NVMe."""
        node = self.cluster.node
        link = node.host_link.bandwidth * self.efficiency.host
        if layout.offload_parameters == "nvme" and node.nvme_bandwidth:
            link = min(link, node.nvme_bandwidth / node.devices)
        return size / link

    def _whole(
        self, layout: Layout, copies: float, back: float, within: Group, across: Group
    ) -> Sharding:
        """Every rank holds all parameters: gradients are summed once a step."""
        numbers = self.trained / layout.tensor / layout.pipeline
        share = min(1.0, BUCKET / max(1.0, 4 * numbers))
        if layout.sharding == "zero1" and within.ranks > 1:
            # over gloo an all-to-all, whose parts each rank sums itself
            on_cpu = self.cluster.device.kind == "cpu"
            once = (within.all_to_all if on_cpu else within.reduce_scatter)(back * numbers)
            once += across.all_reduce(4 * numbers / within.ranks)
            kept = 2 if layout.compute == "bf16_pure" else 4
            after = within.all_gather(kept * numbers)
            ahead = "shard" in self.conventions.asynchronous
            return Sharding(copies, once=once, last=once * share, after=after, ahead=ahead)
        inner = layout.tensor * layout.expert
        once = self._group(within.ranks * across.ranks, inner).all_reduce(back * numbers)
        return Sharding(copies, once=once, last=once * share)

    def _group(self, ranks: int, stride: int) -> Group:
        return group(self.cluster, self.efficiency, ranks, stride)

    def _copied(self, layout: Layout, layer: float, trained: float, sharded: bool) -> float:
        """Bytes moved for a layer's parameters and gradients in a micro batch, besides what
        computes with them: out of what was gathered and into what will be reduced; or casts of
        autocast, of the weights and their gradients, and the sum in the buckets."""
        if self.conventions.copied_bytes is not None:
            return self.conventions.copied_bytes * layer
        wide = layout.compute == "fp32"
        if sharded:
            gathers = 1 if layout.sharding == "shard_grad_op" else 2
            return gathers * (8 if wide else 4) * layer + (8 if wide else 6) * trained
        if wide or layout.compute == "bf16_pure":
            return 10 * trained
        again = layout.activation_checkpointing not in ("none", "offload")
        casts = 0 if layout.adapter != "none" else 6 * layer * (2 if again else 1)
        return casts + 16 * trained
