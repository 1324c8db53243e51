"""The time of a step, put together from its parts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter
from typing import TypeVar

from rostra.hardware.cluster import Cluster
from rostra.layout import Layout
from rostra.plan.conventions import ROSTRA, Conventions
from rostra.plan.efficiency import Efficiency, typical
from rostra.plan.job import Job
from rostra.plan.results import Time
from rostra.plan.time.exchange import ExchangeTimes
from rostra.plan.time.flops import hardware_flops, model_flops
from rostra.plan.time.layers import LayerTimes
from rostra.plan.time.sharding import ShardingTimes
from rostra.plan.time.update import UpdateTimes

Value = TypeVar("Value")

# What the parts look at in a layout; each is computed once for what it depends on.
_COMPUTED = (
    "micro_batch", "context", "tensor", "compute", "compile", "quantization", "adapter",
    "activation_checkpointing", "context_method",
)  # fmt: skip
_EXCHANGED = (*_COMPUTED, "expert")
_SHARDED = (
    "replicate", "shard", "context", "tensor", "pipeline", "expert", "engine", "sharding",
    "compute", "reduction", "quantization", "adapter", "offload_parameters",
    "activation_checkpointing",
)  # fmt: skip
_UPDATED = (
    "shard", "context", "tensor", "pipeline", "sharding", "optimizer_states", "adapter",
    "offload_optimizer", "offload_parameters", "compile",
)  # fmt: skip


class TimeModel:
    """Called with a Layout, gives its Time.

    `efficiency` is what kernels reach on these devices, by default what was measured of this
    machine when they are its own, else what is typical of their kind; `conventions` describe
    another trainer than Rostra.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        efficiency: Efficiency | None = None,
        conventions: Conventions = ROSTRA,
    ) -> None:
        self.job, self.cluster = job, cluster
        self.efficiency = efficiency or efficiency_of(cluster)
        given = (job, cluster, self.efficiency, conventions)
        layers = LayerTimes(job, cluster.device, self.efficiency, conventions)
        self._exchanges, self._updates = ExchangeTimes(*given), UpdateTimes(*given[:3])
        self._micro = _remembered(layers, _COMPUTED)
        self._exchange = _remembered(lambda x: self._exchanges(x, self._micro(x)), _EXCHANGED)
        self._sharding = _remembered(ShardingTimes(*given), _SHARDED)
        self._update = _remembered(self._updates, _UPDATED)
        self._flops = _remembered(
            lambda x: (model_flops(job, x), hardware_flops(job, x)),
            ("adapter", "activation_checkpointing"),
        )
        self._cuts: dict[tuple[int, int], list[int]] = {}  # layers of each rank of a pipeline

    def __call__(self, layout: Layout) -> Time:
        micro, sharding = self._micro(layout), self._sharding(layout)
        tensor, context = self._exchange(layout)
        times, late = layout.accumulation, micro.late(self.efficiency.ahead)
        layer = micro.device + late + tensor + context
        forward = (layer - micro.device) / 3 + micro.forward.device
        depth, heads = self._slowest(layout, micro.around.device / layer)
        pace = depth, forward, layer - forward, layout.pipeline > 1
        shown = sharding.shown(*pace)
        sent = sharding.among_ranks().shown(*pace) if sharding.fetch else shown
        waited, of_ranks = (x.seconds(self.efficiency.contention) for x in (shown, sent))
        one = depth * layer + heads * micro.around.device + sharding.copies + waited
        bubble = self._bubble(layout, one, depth * micro.weights)
        optimizer, offload = self._update(layout)
        waiting = self._updates.activations(layout, micro.saved, forward, layer - forward)
        of_axis = {
            self._axis(layout): times * of_ranks
            + shown.once
            + self.efficiency.contention * shown.hidden_once,
            "tensor": times * depth * tensor,
            "context": times * depth * context,
            "pipeline": times * self._exchanges.sends(layout),
        }
        model, hardware = self._flops(layout)
        forth, back, around = micro.forward, micro.backward, micro.around
        return Time(
            compute=times * (depth * (forth.products + back.products) + heads * around.products),
            memory=times
            * (depth * (forth.memory + back.memory) + heads * around.memory + sharding.copies),
            recompute=times * depth * micro.again.device,
            communication={axis: seconds for axis, seconds in of_axis.items() if seconds},
            bubble=bubble,
            offload=offload + times * (depth * waiting + waited - of_ranks),
            optimizer=optimizer,
            overhead=times * depth * late,
            model_flops=model,
            hardware_flops=hardware,
        )

    def _axis(self, layout: Layout) -> str:
        """The axis along which parameters and gradients travel."""
        return "replicate" if layout.sharding == "no_shard" else "shard"

    def _slowest(self, layout: Layout, head: float) -> tuple[int, int]:
        """Layers of the slowest rank of the pipeline, and whether the head is with them, which
        takes as long as `head` layers."""
        depth, ranks = self.job.sizes.depth, layout.pipeline
        if ranks == 1:
            return depth, 1
        at = (ranks, layout.stages)
        if at not in self._cuts:
            borders = self.job.sizes.cuts(ranks * layout.stages)
            sizes = [end - start for start, end in pairwise(borders)]
            self._cuts[at] = [sum(sizes[rank::ranks]) for rank in range(ranks)]
        *others, last = self._cuts[at]
        return (last, 1) if last + head >= max(others) else (max(others), 0)

    def _bubble(self, layout: Layout, one: float, weights: float) -> float:
        """Seconds in which a rank of the pipeline has nothing to do: of p ranks with v stages
        each (p - 1) / v micro batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.2);
        zero_bubble fills them with gradients of weights (Qi et al. 2024, arXiv:2401.10241,
        table 1: (p - 1)(F + B - W))."""
        if layout.pipeline == 1:
            return 0.0
        if layout.splits_backward:
            one = max(0.0, one - 2 * weights)
        return (layout.pipeline - 1) / layout.stages * one


def efficiency_of(cluster: Cluster) -> Efficiency:
    """Measured by `rostra calibrate`, where the cluster is this machine and it was; or typical."""
    if cluster.calibrated:
        from rostra.plan.calibrate import measured_efficiency

        if (measured := measured_efficiency(cluster)) is not None:
            return measured
    return typical(cluster.device)


def _remembered(
    function: Callable[[Layout], Value], fields: tuple[str, ...]
) -> Callable[[Layout], Value]:
    """`function`, called once for each combination of the `fields` of a layout."""
    key = attrgetter(*fields)
    known: dict[tuple[object, ...], Value] = {}

    def call(layout: Layout) -> Value:
        at = key(layout)
        if at not in known:
            known[at] = function(layout)
        return known[at]

    return call
