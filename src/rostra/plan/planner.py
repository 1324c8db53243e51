"""The plan of a job on a cluster: the search, its choice, and what the choice makes of the run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rostra.hardware import Cluster
from rostra.layout import Layout
from rostra.plan.choice import about_beats, choose
from rostra.plan.job import Job
from rostra.plan.memory import MemoryModel
from rostra.plan.results import Candidate, Memory, Time
from rostra.plan.scaled import ScaledMemory
from rostra.plan.search import GOALS, Entry, Found, Goal, Miss, Models, Room, search
from rostra.plan.space import Limits, Space
from rostra.plan.techniques import Technique, techniques_of, variants
from rostra.plan.time import TimeModel
from rostra.plan.traces import Traces, When

# Share of the memory that a plan leaves free: what formulas may err by, and, where the device is
# the host, what else lives there.
SPARE = {"gpu": 0.03, "cpu": 0.1}
HOST_SPARE = 0.1
SHOWN = 6  # strategies beside the chosen one
FEW = 2  # of them, where none is a trade


@dataclass(frozen=True)
class Plan:
    """What was found for a job. Without a layout that fits, `chosen` is None."""

    job: Job
    cluster: Cluster
    goal: Goal
    allowed: tuple[Technique, ...]
    jobs: tuple[Job, ...]  # with each set of techniques that was looked at; the job's own first
    models: tuple[Models, ...]  # of each
    memories: tuple[ScaledMemory, ...]  # those of `models`
    found: Found
    room: Room
    search_seconds: float
    traces: Traces | None  # None: none were asked for
    chosen: Candidate | None
    narrowly: Candidate | None = None  # better by the goal, by too little for what it is made of
    alternatives: tuple[Candidate, ...] = ()  # the best layouts of other strategies
    notes: tuple[str, ...] = ()  # what was assumed

    @property
    def feasible(self) -> bool:
        return self.chosen is not None

    @property
    def considered(self) -> int:
        return self.found.considered

    def best(self, goal: Goal) -> Candidate | None:
        entry = self.found.best(goal)
        return None if entry is None else self.candidate(entry)

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The trades between time, price, devices and free memory, the fastest first."""
        entries = sorted(self.found.front, key=lambda x: x.by("fastest"))
        return tuple(map(self.candidate, entries))

    def candidate(self, entry: Entry | Miss) -> Candidate:
        job, models, layout = self.jobs[entry.variant], self.models[entry.variant], entry.layout
        return assess(job, self.cluster, layout, models.memory(layout), models.time(layout))

    def memory_of(self, job: Job, cluster: Cluster, variant: int = 0) -> ScaledMemory:
        """The memory of another job, by formulas and what traces of this one taught."""
        return self.memories[variant].like(MemoryModel(job, cluster))

    def to_dict(self) -> dict[str, Any]:
        best: dict[str, Any] = {
            goal: None if (x := self.best(goal)) is None else x.to_dict() for goal in GOALS
        }
        front = self.found.front
        return {
            "feasible": self.feasible,
            "goal": self.goal,
            "chosen": None if self.chosen is None else self.chosen.to_dict(),
            "considered": self.considered,
            "fitting": self.found.fitting,
            "search_seconds": self.search_seconds,
            "traces": None if self.traces is None else self.traces.to_dict(),
            "alternatives": [x.to_dict() for x in self.alternatives],
            **best,
            "front": [
                {
                    "layout": x.layout.to_dict(),
                    "step_seconds": x.seconds,
                    "ranks": x.ranks,
                    "peak_bytes": self.candidate(x).memory.peak,
                }
                for x in sorted(front, key=lambda x: x.by("fastest"))
            ],
            "hardware": {
                "name": self.cluster.name,
                "devices": self.cluster.devices,
                "device": self.cluster.device.name,
                "device_memory_bytes": self.cluster.device.memory_bytes,
                "usable_memory_bytes": self.room.device,
                "price_per_hour": self.cluster.price_per_hour,
                "currency": self.cluster.currency,
                "calibrated": self.cluster.calibrated,
            },
            "model": {
                "family": self.job.sizes.family,
                "parameters": self.job.sizes.parameters,
                "sequence_length": self.job.length,
                "global_batch_size": self.job.global_batch,
                "tokens": self.job.tokens,
            },
            "allowed": [technique.name for technique in self.allowed],
            "notes": list(self.notes),
        }


def make_plan(
    job: Job,
    cluster: Cluster,
    allow: Iterable[str] = (),
    goal: Goal = "fastest",
    limits: Limits | None = None,
    trace: When | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Search every layout that the config leaves open, and choose by `goal` the best, in which
    each part has to earn its place (`rostra.plan.choice`).

    `allow` names techniques that may be used beside (see `rostra.plan.techniques`). With `trace`,
    the memory of the choice is checked by running its engine on fake tensors (see
    `rostra.plan.traces`), where that can be done. What a trace refutes, and what it teaches of a
    family that no formula knows, the search takes up: it begins anew. Raises RequestError for
    unknown techniques.
    """
    allowed = techniques_of(allow)
    asked = list(variants(job.config, allowed))
    jobs = tuple(replace(job, config=changed) for _, changed in asked)
    room, limits = room_of(cluster), replace(limits or Limits(), thin=len(jobs) > 1)
    memories = tuple(ScaledMemory(MemoryModel(variant, cluster)) for variant in jobs)
    models = tuple(
        Models(memory, TimeModel(variant, cluster), room, number, len(used))
        for number, (memory, variant, (used, _)) in enumerate(
            zip(memories, jobs, asked, strict=True)
        )
    )
    traces = None if trace is None else Traces(trace)
    while True:
        began, found = time.perf_counter(), Found()
        for variant, each in zip(jobs, models, strict=True):
            search(Space(variant, cluster, limits).blocks(), each, found)
        plan = Plan(
            job=job, cluster=cluster, goal=goal, allowed=allowed, jobs=jobs, models=models,
            memories=memories, found=found, room=room, traces=traces, chosen=None,
            search_seconds=time.perf_counter() - began, notes=tuple(notes),
        )  # fmt: skip
        if traces is None or not _learns(plan, traces):
            return _decided(plan)


def _decided(plan: Plan) -> Plan:
    """With its choice, if something fits, and what is shown beside."""
    entry, best = choose(plan.found.bests.values(), plan.goal), plan.found.best(plan.goal)
    if entry is None or best is None:
        return plan
    chosen = plan.candidate(entry)
    shown = _others(plan.found, plan.goal, chosen)[:SHOWN]
    return replace(
        plan,
        chosen=chosen,
        narrowly=None if best.layout == chosen.layout else plan.candidate(best),
        alternatives=tuple(map(plan.candidate, shown)),
    )


def _learns(plan: Plan, traces: Traces) -> bool:
    """Trace what the plan would take: whether that teaches what another search may answer to."""
    while (entry := _to_trace(plan, traces)) is not None:
        memory = plan.memories[entry.variant]
        job = plan.jobs[entry.variant]
        refuted = traces.refutes(entry, job, plan.cluster, memory, plan.room)
        if refuted is not None:
            return refuted or not memory.known
    return False


def _to_trace(plan: Plan, traces: Traces) -> Entry | Miss | None:
    """What the plan would take, unless it was traced. Where it cannot be, and no formula knows
    the family, the best of another strategy, with the same checkpointing."""
    found, goal = plan.found, plan.goal
    first = choose(found.bests.values(), goal) or found.nearest()
    if first is None or not traces.left:
        return None
    memory, all_fit = plan.memories[first.variant], found.fitting == found.considered
    idle = memory.known and isinstance(first, Miss)  # formulas have decided
    if idle or memory.traced(first.layout) or not traces.wanted(first, memory, plan.room, all_fit):
        return None
    if traces.possible(first, memory):
        return first
    mode = memory.twin(first.layout).activation_checkpointing
    if memory.known or memory.taught(mode):
        return None
    alike = [
        replace(x, layout=replace(x.layout, activation_checkpointing=mode))
        for x in found.kinds.values()
    ]
    left = [x for x in alike if traces.possible(x, memory)]
    misses = [x for x in left if isinstance(x, Miss)]
    return choose([x for x in left if isinstance(x, Entry)], goal) or min(
        misses, key=lambda x: x.shortage, default=None
    )


def _others(found: Found, goal: Goal, chosen: Candidate) -> list[Entry]:
    """The best layouts of other strategies, by `goal`, that are worth a line: no simpler one is
    about as good in time, price, devices and memory. Where there is no such, a few of the rest."""
    best = chosen.time.step, chosen.layout.world_size, chosen.memory.peak
    trades = [best]
    kept: list[Entry] = []
    rest: list[Entry] = []
    entries = [x for x in found.kinds.values() if isinstance(x, Entry)]
    for x in sorted(entries, key=lambda x: (x.parts, x.by(goal))):
        values = x.seconds, x.ranks, x.peak
        if x.layout == chosen.layout:
            continue
        if any(about_beats(other, values) for other in trades):
            rest.append(x)
        else:
            trades.append(values)
            kept.append(x)
    return sorted(kept, key=lambda x: x.by(goal)) or rest[:FEW]


def assess(
    job: Job,
    cluster: Cluster,
    layout: Layout,
    memory: Memory | None = None,
    seconds: Time | None = None,
) -> Candidate:
    """A layout with what it needs and what it makes of the run.

    MFU takes the model's operations, without recomputation, over the peak of the layout's
    precision on all its devices (Chowdhery et al. 2022, arXiv:2204.02311, appendix B); HFU
    counts what is computed again too. Energy is that of the devices at full load.
    """
    memory = memory or MemoryModel(job, cluster)(layout)
    seconds = seconds or TimeModel(job, cluster)(layout)
    ranks, step = layout.world_size, seconds.step
    per_second = job.global_batch * job.length / step
    peak = ranks * peak_of(cluster, layout) * step
    hours = None if job.tokens is None else job.tokens / per_second / 3600
    rate = cluster.price_per_hour
    return Candidate(
        layout=layout,
        memory=memory,
        time=seconds,
        tokens_per_second=per_second,
        mfu=seconds.model_flops / peak,
        hfu=seconds.hardware_flops / peak,
        hours=hours,
        price=None if hours is None or rate is None else hours * ranks * rate,
        energy_kwh=None if hours is None else hours * ranks * cluster.device.watts / 1000,
    )


def peak_of(cluster: Cluster, layout: Layout) -> float:
    """Operations a second of a device in the layout's precision; where it has no units for it,
    in float32."""
    flops = {str(precision): peak for precision, peak in cluster.device.flops.items()}
    return flops.get(layout.compute.removesuffix("_pure"), flops.get("fp32", max(flops.values())))


def room_of(cluster: Cluster) -> Room:
    """Memory that a plan may fill."""
    node = cluster.node
    return Room(
        device=int(cluster.device.memory_bytes * (1 - SPARE[cluster.device.kind])),
        host=int(node.host_memory_bytes * (1 - HOST_SPARE)),
        nvme=int(node.nvme_bytes * (1 - HOST_SPARE)),
        ranks_per_node=node.devices,
    )
