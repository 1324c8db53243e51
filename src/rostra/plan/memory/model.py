"""Memory of any layout by closed formulas: what lies on a rank from step to step, and what lives
beside it at the peak of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from rostra.hardware.cluster import Cluster
from rostra.layout import Layout
from rostra.parallel.pipeline import SEVERAL
from rostra.plan.conventions import ROSTRA, Conventions
from rostra.plan.job import Job
from rostra.plan.memory.allocator import kept_blocks, outside
from rostra.plan.memory.growth import at, highest_of
from rostra.plan.memory.host import Beside, beside
from rostra.plan.memory.lasting import lasting, of_lasting, of_units, units
from rostra.plan.memory.pipeline import in_flight, waiting
from rostra.plan.memory.setting import STYLES
from rostra.plan.memory.step import Moment, Parts, Stage, moments, update
from rostra.plan.memory.tape import Profile
from rostra.plan.memory.weights import Unit
from rostra.plan.memory.working import Work, Working
from rostra.plan.results import Memory

T = TypeVar("T")
TOKEN = 3 * 8  # bytes of one: its id, its label, its position

_of_host = attrgetter("offload_parameters", "offload_optimizer", "world_size")
_of_shared = attrgetter("context", "context_method", "compute", "compile")
_of_ranks = attrgetter(
    "pipeline", "stages", "tensor", "context", "shard", "sharding", "compute", "reduction",
    "quantization", "adapter", "optimizer_states", "optimizer_in_backward", "engine", "compile",
    "context_method", "activation_checkpointing", "offload_parameters", "offload_optimizer",
    "expert",
)  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """A rank of the pipeline, whatever its micro batches."""

    number: int
    held: Unit
    stage: Stage
    peaks: tuple[tuple[float, float, Moment], ...]  # bytes, more for each token, and of what
    update: Moment
    waits: complex  # bytes of a micro batch between its passes
    shared: complex  # of what all layers share
    offloaded: complex  # that wait on the host
    outside: float  # that are not the allocator's
    key: tuple[Hashable, ...]  # of `held`


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
        self._kinds = tuple(layer for layer, _ in job.sizes.layers)
        self._layers = job.sizes.order  # numbers in `_kinds`
        largest = max((layer.numbers for layer in self._kinds), default=0)
        self._largest = max(largest, job.sizes.embedding)
        self._known: dict[Hashable, Any] = {}

    def __call__(self, layout: Layout) -> Memory:
        """Memory of the rank that needs most."""
        x, tokens = layout, self._working.tokens(layout)
        given = TOKEN * x.micro_batch * x.accumulation * self.job.length
        best: tuple[float, Rank, Moment, float, float] | None = None
        for rank in self._ranks(x):
            layers, loss = rank.stage.layers, rank.stage.loss
            there = batch = given + at(rank.shared, tokens)
            if x.pipeline > 1:
                others = (in_flight(x, rank.number) - 1) * rank.waits
                others += waiting(x, rank.number) * layers.halfway
                there += at(others, tokens)
            if loss is not None:
                there += at(loss.outputs, tokens) * x.accumulation
            whole = 0.0 if self.conventions.slices else layers.whole
            buffers = self._exchanged(x, rank.number, at(whole or layers.input, tokens))
            buffers += rank.stage.parts.resident
            fixed, each, moment = max(rank.peaks, key=lambda peak: peak[0] + peak[1] * tokens)
            total = fixed + each * tokens + there + buffers
            updated = sum(rank.update).real + batch
            if updated > total:
                total, moment, there, buffers = updated, rank.update, batch, 0.0
            total += rank.held.part + rank.held.states_part
            if best is None or total > best[0]:
                best = (total, rank, moment, there, buffers)
        assert best is not None
        return self._memory(layout, *best[1:])

    def _memory(self, x: Layout, rank: Rank, moment: Moment, there: float, more: float) -> Memory:
        """At `moment`, with bytes that are `there` of the batch and of other micro batches, and
        `more` to receive them."""
        held, tokens = rank.held, self._working.tokens(x)
        parameters, states = held.part, held.states_part
        gradients, activations, logits, gathered, communication, temporary = (
            at(size, tokens) for size in moment
        )
        apart, reserved, offloaded = Beside(), 0.0, 0.0
        if self.on_gpu:
            apart = self._once(("beside", *_of_host(x), *rank.key), partial(self._beside, x, held))
            offloaded = at(rank.offloaded, tokens)
            if x.offload_parameters != "none":
                parameters = 0.0
            if x.offload_optimizer != "none" or x.optimizer_states == "paged_int8":
                states = 0.0
            reached = Moment(gradients, activations + there, logits)
            reserved = kept_blocks(rank.stage, reached, tokens) + rank.outside
        scales = held.scales_part if parameters else 0.0
        kinds = {
            "parameters": int(parameters - scales),
            "quantization": int(scales),
            "gradients": int(gradients),
            "optimizer": int(states),
            "activations": int(activations + there + temporary),
            "logits": int(logits),
            "gathered": int(gathered),
            "communication": int(communication + more),
            "reserved": int(reserved),
        }
        return Memory(
            kinds, int(apart.host + offloaded), int(apart.nvme), int(apart.loading),
            int(apart.loading_host), int(apart.saving), int(apart.saving_host), self.source,
        )  # fmt: skip

    def _beside(self, x: Layout, held: Unit) -> Beside:
        return beside(x, held, self._largest / x.tensor, self.job.sizes.parameters)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = make()
        return found

    # ranks

    def _ranks(self, x: Layout) -> tuple[Rank, ...]:
        """The ranks of the pipeline that may need most, with what lies there."""
        more = x.replicate > 1, x.accumulation > 1, self._working.chunks(x)
        key = (*_of_ranks(x), *more, x.splits_backward)
        found = self._known.get(key)
        if found is None:
            of_cuts = "numbers", x.pipeline, x.stages, x.splits_backward
            numbers = self._once(of_cuts, partial(self._numbers, x))
            found = self._known[key] = tuple(self._rank(x, number) for number in numbers)
        return found

    def _numbers(self, x: Layout) -> list[int]:
        """The ends of the pipeline, and between them who has more layers than all before, which
        wait longer for their backward passes; under zero bubble, where most wait for their second
        part in the end, than all behind."""
        found = {0, x.pipeline - 1}
        most: list[Counter[int]] = []
        for number in sorted(range(1, x.pipeline - 1), reverse=x.splits_backward):
            own = Counter(self._layers[i] for i in self._split(x, number))
            if not any(own <= other for other in most):
                most.append(own)
                found.add(number)
        return sorted(found)

    def _rank(self, x: Layout, number: int) -> Rank:
        of_weights = number, *of_lasting(x)
        of_work = number, x.pipeline, x.stages, self._working.chunks(x), *self._working.of_layers(x)
        held, parts = self._once(("weights", of_weights), partial(self._lasting, x, number))
        work = self._once(("work", of_work), partial(self._work, x, number))
        stage = Stage(work.layers, work.loss, parts, number == 0)
        peaks = self._once(("peaks", parts, of_work), partial(_peaks, stage))
        shared = self._once(("shared", _of_shared(x)), partial(self._working.shared, x))
        return Rank(
            number, held, stage, peaks, update(parts), stage.waits(x.stages), shared,
            work.offloaded, outside(x), of_weights,
        )  # fmt: skip

    def _exchanged(self, x: Layout, rank: int, size: float) -> float:
        """Buffers of `size` that a rank's stages receive each micro batch's hidden states into,
        and their gradients, made at the first step (torch.distributed.pipelining; on a CPU the
        instrument sees what a step takes, and not these). Schedules of several stages keep what
        they send until the step ends, too."""
        if x.pipeline == 1:
            return 0.0
        ends = (rank == 0) + (rank == x.pipeline - 1)
        kept = (1 if self.on_gpu else 0) + (1 if x.pipeline_schedule in SEVERAL else 0)
        return kept * (2 * x.stages - ends) * x.accumulation * size

    def _split(self, x: Layout, rank: int) -> tuple[int, ...]:
        """Which layers a rank of the pipeline has."""
        count = x.pipeline * x.stages
        if count == 1:
            return tuple(range(len(self._layers)))
        cuts = self._once(("cuts", count), lambda: self.job.sizes.cuts(count))
        places = range(rank, count, x.pipeline)
        return tuple(i for place in places for i in range(cuts[place], cuts[place + 1]))

    def _lasting(self, x: Layout, rank: int) -> tuple[Unit, Parts]:
        own = [self._kinds[self._layers[i]] for i in self._split(x, rank)]
        ends = rank == 0, rank == x.pipeline - 1
        make = partial(units, self.job, x, own, ends, self.conventions)
        found = self._once(("units", rank, of_units(x)), make)
        return lasting(self.job, x, found, self.conventions, self.on_gpu)

    def _work(self, x: Layout, rank: int) -> Work:
        mode, _, every = x.activation_checkpointing.partition(":")
        found: dict[tuple[int, bool, bool], Profile] = {}
        profiles = []
        for index in self._split(x, rank):
            kind = self._layers[index]
            again = mode != "every" or index % int(every) == 0
            key = kind, again, index == 0 and x.adapter != "none"
            if key not in found:
                found[key] = self._working.profile(x, self._kinds[kind], *key[1:])
            profiles.append(found[key])
        return self._working.work(x, profiles, rank == x.pipeline - 1)


def _peaks(stage: Stage) -> tuple[tuple[float, float, Moment], ...]:
    found = list(moments(stage))
    totals = [complex(sum(moment)) for moment in found]
    sized = [(total.real, total.imag, m) for total, m in zip(totals, found, strict=True)]
    return tuple(highest_of(sized, totals))
