"""The plan of a job on a cluster: the search, its choice, and what the choice makes of the run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch.distributed as dist

from rostra.hardware import Cluster
from rostra.layout import Layout
from rostra.plan.choice import about_beats, choose
from rostra.plan.job import Job
from rostra.plan.memory import MemoryModel
from rostra.plan.results import Candidate, Memory, Time
from rostra.plan.scaled import ScaledMemory
from rostra.plan.search import GOALS, Entry, Found, Goal, Miss, Models, Room, search, simplicity
from rostra.plan.space import Limits, Space
from rostra.plan.techniques import Technique, techniques_of, variants
from rostra.plan.time import TimeModel

# Share of the memory that a plan leaves free: what formulas may err by, and, where the device is
# the host, what else lives there.
SPARE = {"gpu": 0.03, "cpu": 0.1}
HOST_SPARE = 0.1
SHOWN = 6  # strategies beside the chosen one
FEW = 2  # of them, where none is a trade
_TRACES = 4  # layouts that are traced before the rest is left to the formulas


@dataclass(frozen=True)
class Plan:
    """What was found for a job. Without a layout that fits, `chosen` is None."""

    job: Job
    cluster: Cluster
    goal: Goal
    allowed: tuple[Technique, ...]
    jobs: tuple[Job, ...]  # with each set of techniques that was looked at; the job's own first
    models: tuple[Models, ...]  # of each
    found: Found
    room: Room
    search_seconds: float
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
            "alternatives": [x.to_dict() for x in self.alternatives],
            **best,
            "front": [
                {
                    "layout": x.layout.to_dict(),
                    "step_seconds": x.seconds,
                    "ranks": x.ranks,
                    "peak_bytes": x.peak,
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
    trace: bool = False,
    notes: Sequence[str] = (),
) -> Plan:
    """Search every layout that the config leaves open, and choose by `goal` the best, in which
    each part has to earn its place (`rostra.plan.choice`).

    `allow` names techniques that may be used beside (see `rostra.plan.techniques`). With `trace`,
    the memory of the choice is checked by running its engine on fake tensors, where that can be
    done, and a choice that this refutes is replaced; of a family that no formula knows, traces
    scale what the formulas say of the others too. Raises RequestError for unknown techniques.
    """
    began = time.perf_counter()
    allowed = techniques_of(allow)
    asked = list(variants(job.config, allowed))
    jobs = tuple(replace(job, config=changed) for _, changed in asked)
    room, trace = room_of(cluster), trace and not dist.is_initialized()
    limits = replace(limits or Limits(), thin=len(jobs) > 1)
    memories = [ScaledMemory(MemoryModel(variant, cluster)) for variant in jobs]
    models = tuple(
        Models(memory, TimeModel(variant, cluster), room, number, len(used))
        for number, (memory, variant, (used, _)) in enumerate(
            zip(memories, jobs, asked, strict=True)
        )
    )
    for _ in range(_TRACES):
        found = Found()
        for variant, each in zip(jobs, models, strict=True):
            search(Space(variant, cluster, limits).blocks(), each, found)
        plan = Plan(
            job=job, cluster=cluster, goal=goal, allowed=allowed, jobs=jobs, models=models,
            found=found, room=room, search_seconds=time.perf_counter() - began, chosen=None,
            notes=tuple(notes),
        )  # fmt: skip
        if not trace or not _learns(plan, memories):
            break
    choice = _choose(plan, trace)
    if choice is None:
        return plan
    chosen, best = choice
    shown = _others(found, goal, chosen)[:SHOWN]
    return replace(
        plan,
        chosen=chosen,
        narrowly=None if best.layout == chosen.layout else plan.candidate(best),
        alternatives=tuple(map(plan.candidate, shown)),
    )


def _learns(plan: Plan, memories: Sequence[ScaledMemory]) -> bool:
    """Whether a trace of what the search would take taught something of an unknown family."""
    entry = choose(plan.found.bests.values(), plan.goal) or plan.found.nearest()
    if entry is None or memories[entry.variant].known:
        return False
    memory, layout = memories[entry.variant], entry.layout
    if memory.learned(layout):
        return False
    trace = _trace(plan.jobs[entry.variant], layout, plan.cluster)
    if trace is None or trace.source != "trace":
        return False
    memory.learn(layout, trace)
    return True


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


def _choose(plan: Plan, trace: bool) -> tuple[Candidate, Entry] | None:
    """The plan's choice whose trace, if it can be made, finds room for it too, and the best by
    the goal itself of those that were left to choose from."""
    found = plan.found
    strategies = [x for x in found.kinds.values() if isinstance(x, Entry)]
    left = {*found.bests.values(), *found.front, *strategies}
    for traces in count():
        if (entry := choose(left, plan.goal)) is None:
            return None
        candidate = plan.candidate(entry)
        best = min(left, key=lambda x: (x.by(plan.goal), simplicity(x.layout)))
        if not trace or traces == _TRACES:
            return candidate, best
        memory = _traced(plan.jobs[entry.variant], entry.layout, plan.cluster, candidate.memory)
        if not plan.room.shortage(memory, entry.ranks):
            return replace(candidate, memory=memory), best
        # the formulas gave so many bytes for what does not fit
        left = {x for x in left if x.peak < entry.peak}
    return None


def _traced(job: Job, layout: Layout, cluster: Cluster, formula: Memory) -> Memory:
    """The trace of a layout; what no trace tells (host, loading, saving) is the formulas'."""
    memory = _trace(job, layout, cluster)
    if memory is None:
        return formula
    names = ("host", "nvme", "loading", "loading_host", "saving", "saving_host")
    more = {name: getattr(memory, name) or getattr(formula, name) for name in names}
    reserved = memory.kinds.get("reserved") or formula.kinds.get("reserved", 0)
    return replace(memory, kinds={**memory.kinds, "reserved": reserved}, **more)


def _trace(job: Job, layout: Layout, cluster: Cluster) -> Memory | None:
    from rostra.plan.trace import traced  # the engine comes with it, which no search needs

    try:
        return traced(job, layout, cluster)
    except Exception:  # whatever an engine needs that is not here: the formulas stand
        return None


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
