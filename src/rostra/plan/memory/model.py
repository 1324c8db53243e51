"""Memory of any layout by closed formulas: what lies on a rank from step to step, and what lives
beside it at the peak of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, TypeVar

from rostra.hardware.cluster import Cluster
from rostra.layout import Layout
from rostra.parallel.pipeline_split import balance
from rostra.plan.conventions import ROSTRA, Conventions
from rostra.plan.job import Job, Layer
from rostra.plan.memory.allocator import kept_blocks, outside
from rostra.plan.memory.host import Beside, beside
from rostra.plan.memory.lasting import is_collected, is_sharded, lasting, recasts
from rostra.plan.memory.pipeline import in_flight, waiting
from rostra.plan.memory.setting import STYLES
from rostra.plan.memory.step import Moment, Parts, Stage, moments
from rostra.plan.memory.weights import Unit
from rostra.plan.memory.working import Work, Working
from rostra.plan.results import Memory

T = TypeVar("T")
TOKEN = 3 * 8  # bytes of one: its id, its label, its position


class MemoryModel:
    """Memory of a job's layouts on a cluster. Terms are kept by what they depend on.

    Of a family whose operations are not known, layers are taken by their linears alone, and
    `Memory.source` says so.
    """

    def __init__(self, job: Job, cluster: Cluster, conventions: Conventions = ROSTRA) -> None:
        self.job, self.cluster, self.conventions = job, cluster, conventions
        self.source = "formula" if job.sizes.family in STYLES else "linears"
        self.on_gpu = cluster.device.kind == "gpu"
        self._working = Working(job, cluster.device.kind, conventions)
        self._layers = _in_order(job)
        self._known: dict[Hashable, Any] = {}

    def __call__(self, layout: Layout) -> Memory:
        """Memory of the rank that needs most."""
        best: tuple[float, Stage, Moment, Unit, Work] | None = None
        for stage, held, work in self._stages(layout):
            moment = max(moments(stage), key=sum)
            total = sum(moment) + held.part + held.states_part
            if best is None or total > best[0]:
                best = (total, stage, moment, held, work)
        assert best is not None
        return self._memory(layout, *best[1:])

    def _memory(self, x: Layout, stage: Stage, at: Moment, held: Unit, work: Work) -> Memory:
        parameters, states, gradients = held.part, held.states_part, at.gradients
        apart = Beside()
        reserved = 0.0
        if self.on_gpu:
            apart = self._once(
                (
                    "beside",
                    *_of_weights(x),
                    x.activation_checkpointing == "offload",
                    work.offloaded,
                ),
                partial(self._beside, x, held, work.offloaded),
            )
            if x.offload_parameters != "none":
                parameters = 0.0
            if x.offload_optimizer != "none" or x.optimizer_states == "paged_int8":
                states = 0.0
            reserved = kept_blocks(stage, at) + outside(x)
        scales = held.scales_part if parameters else 0.0
        kinds = {
            "parameters": int(parameters - scales),
            "quantization": int(scales),
            "gradients": int(gradients),
            "optimizer": int(states),
            "activations": int(at.activations + at.temporary),
            "logits": int(at.logits),
            "gathered": int(at.gathered),
            "communication": int(at.communication),
            "reserved": int(reserved),
        }
        return Memory(
            kinds, int(apart.host), int(apart.nvme), int(apart.loading), int(apart.loading_host),
            int(apart.saving), int(apart.saving_host), self.source,
        )  # fmt: skip

    def _beside(self, x: Layout, held: Unit, offloaded: float) -> Beside:
        largest = max((layer.numbers for layer in self._layers), default=0)
        largest = max(largest, self.job.sizes.embedding)
        return beside(x, held, largest / x.tensor, offloaded, self.job.sizes.parameters)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = make()
        return found

    # stages

    def _stages(self, x: Layout) -> Iterator[tuple[Stage, Unit, Work]]:
        """The ranks of the pipeline that may need most, with what lies there."""
        of_weights, of_work = _of_weights(x), (x.pipeline, x.stages, *_of_layer(x))
        tokens = TOKEN * x.micro_batch * x.accumulation * self.job.length
        ranks = (0,) if x.pipeline == 1 else sorted({0, 1, x.pipeline - 1})
        for rank in ranks:
            held, parts = self._once(("weights", rank, of_weights), partial(self._lasting, x, rank))
            work = self._once(("work", rank, of_work), partial(self._work, x, rank))
            outputs = work.loss.outputs * x.accumulation if work.loss is not None else 0.0
            stage = Stage(
                work.layers, work.loss, parts, in_flight(x, rank), waiting(x, rank), rank == 0,
                x.stages if x.pipeline > 1 else 0, outputs,
                self._received(x, rank, work.layers.input) + parts.resident, tokens + work.shared,
            )  # fmt: skip
            yield stage, held, work

    def _received(self, x: Layout, rank: int, size: float) -> float:
        """Buffers of `size` that a stage receives each micro batch's hidden states into, and
        their gradients, made at the first step (torch.distributed.pipelining). On a CPU the
        instrument sees what a step takes, and not these."""
        if x.pipeline == 1 or not self.on_gpu:
            return 0.0
        ways = (rank > 0 or x.stages > 1) + (rank < x.pipeline - 1 or x.stages > 1)
        return ways * x.accumulation * size * x.stages

    def _split(self, x: Layout, rank: int) -> tuple[int, ...]:
        """Which layers a rank of the pipeline has."""
        count = x.pipeline * x.stages
        if count == 1:
            return tuple(range(len(self._layers)))
        cuts = self._once(("cuts", count), lambda: balance(self._costs(), count))
        places = range(rank, count, x.pipeline)
        return tuple(i for place in places for i in range(cuts[place], cuts[place + 1]))

    def _costs(self) -> list[float]:
        """As `rostra.parallel.pipeline_split.layer_costs` has them."""
        costs = [6.0 * layer.numbers for layer in self._layers]
        costs[-1] += 6.0 * self.job.sizes.embedding
        return costs

    def _lasting(self, x: Layout, rank: int) -> tuple[Unit, Parts]:
        own = [self._layers[i] for i in self._split(x, rank)]
        ends = rank == 0, rank == x.pipeline - 1
        return lasting(self.job, x, own, ends, self.conventions, self.on_gpu)

    def _work(self, x: Layout, rank: int) -> Work:
        mode, _, every = x.activation_checkpointing.partition(":")
        profiles = []
        for index in self._split(x, rank):
            layer = self._layers[index]
            again = mode != "every" or index % int(every) == 0
            first = index == 0 and x.adapter != "none"
            profiles.append(
                self._once(
                    ("profile", layer, again, first, _of_layer(x)),
                    partial(self._working.profile, x, layer, again, first),
                )
            )
        return self._working.work(x, profiles, rank == x.pipeline - 1)


def _in_order(job: Job) -> tuple[Layer, ...]:
    """The layers of a model, those of several kinds spread evenly."""
    placed = [((i + 0.5) / count, layer) for layer, count in job.sizes.layers for i in range(count)]
    return tuple(layer for _, layer in sorted(placed, key=lambda x: x[0]))


def _of_weights(x: Layout) -> tuple[Hashable, ...]:
    """What decides where parameters, gradients and states lie."""
    return (
        x.pipeline, x.stages, x.tensor, x.context, x.shard, x.sharding, x.replicate > 1, x.compute,
        x.reduction, x.quantization, x.adapter, x.optimizer_states, x.optimizer_in_backward,
        x.accumulation > 1, x.engine, x.offload_parameters, x.offload_optimizer, x.compile,
    )  # fmt: skip


def _of_layer(x: Layout) -> tuple[Hashable, ...]:
    """And what decides what a layer keeps of a micro batch."""
    return (
        x.micro_batch, x.tensor, x.context, x.context_method, x.activation_checkpointing, x.compute,
        x.quantization, x.adapter, is_sharded(x), x.compile, is_collected(x), recasts(x),
    )  # fmt: skip
