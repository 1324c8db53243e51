"""Verdicts on what is not the plan: why other strategies are not it, and, where nothing fits,
the least changes of the request that make something fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

from rich.filesize import decimal

from rostra.config.schema import MemorySection, OffloadTable
from rostra.errors import RequestError
from rostra.hardware import Cluster, device_names, read_cluster
from rostra.plan.choice import choose
from rostra.plan.job import Job
from rostra.plan.planner import Plan, assess, room_of
from rostra.plan.results import Candidate, Time
from rostra.plan.search import Entry, Miss, Models, kind_of, parts_of, search
from rostra.plan.space import Limits, Space
from rostra.plan.techniques import TECHNIQUES, adds, variants
from rostra.plan.traces import Traces
from rostra.plan.words import amount, words

SHORTEST = 256  # positions; shorter samples are no longer the same work
MOST = 16  # times the devices that were asked for
_NO_TIME = Time(0.0, 0.0, 0.0, {})


@dataclass(frozen=True)
class Verdict:
    """A strategy that was not chosen, by its best layout, and why."""

    strategy: str
    reason: str
    candidate: Candidate | None  # None: nothing of it fits
    parts: float  # of its best layout, see `rostra.plan.search.parts_of`
    shortage: int = 0  # bytes that a rank lacks of its best layout

    def to_dict(self) -> dict[str, str]:
        return {"strategy": self.strategy, "reason": self.reason}


def verdicts(plan: Plan) -> list[Verdict]:
    """Of each other strategy why it is not the plan's, the best first."""
    if plan.chosen is None:
        return []
    chosen, found, used = plan.chosen, list[Verdict](), _techniques(plan)
    own = {kind_of(chosen.layout, variant) for variant in range(len(plan.jobs))}
    entries = [(k, x) for k, x in plan.found.kinds.items() if isinstance(x, Entry)]
    for kind, entry in sorted(entries, key=lambda x: x[1].by(plan.goal)):
        if entry.layout == chosen.layout or (kind in own and entry.variant == 0):
            continue
        other = plan.candidate(entry)
        slower = entry.seconds / chosen.time.step - 1
        what = f"{abs(slower):.0%} {'slower' if slower >= 0 else 'faster'}"
        if abs(slower) < 0.005:
            what = "as fast"
        if entry.ranks != chosen.layout.world_size:
            what += f", on {entry.ranks} device{'s' * (entry.ranks > 1)}"
        more = (other.price or 0.0) - (chosen.price or 0.0)  # all have one, or none
        if abs(more) >= 0.01:
            what += f", {'+' if more >= 0 else '-'}{amount(abs(more))} {plan.cluster.currency}"
        found.append(Verdict(_strategy(entry, used), what, other, entry.parts))
    misses = [x for x in plan.found.kinds.values() if isinstance(x, Miss)]
    for miss in sorted(misses, key=lambda x: x.shortage):
        said = f"does not fit: {decimal(miss.shortage)} short at the least"
        parts, strategy = parts_of(miss.layout), _strategy(miss, used)
        found.append(Verdict(strategy, said, None, parts, miss.shortage))
    return found


def _strategy(entry: Entry | Miss, used: list[list[str]]) -> str:
    """The best layout of its kind, with the techniques that its config uses."""
    return ", ".join([words(entry.layout), *used[entry.variant]])


def _techniques(plan: Plan) -> list[list[str]]:
    """Those that each of the plan's configs uses; of `compile` a layout's words tell."""
    asked = variants(plan.job.config, plan.allowed)
    return [[t.name for t in used if t.name != "compile"] for used, _ in asked]


@dataclass(frozen=True)
class Change:
    """Something else to ask for. `how` is what the user does."""

    name: str
    how: str
    apply: Callable[[Job, Cluster], tuple[Job, Cluster] | None]


@dataclass(frozen=True)
class Way:
    """Changes that make the job fit, with a layout that then does."""

    changes: tuple[Change, ...]
    candidate: Candidate
    cluster: Cluster

    @property
    def how(self) -> str:
        return " and ".join(change.how for change in self.changes)

    def to_dict(self) -> dict[str, object]:
        return {
            "changes": [change.how for change in self.changes],
            "hardware": self.cluster.name,
            **self.candidate.to_dict(),
        }


def ways_to_fit(plan: Plan, most: int = 5) -> list[Way]:
    """The least changes of a plan's request after which something fits: single ones, or, where
    none is enough, two together. Of one sort of change the smallest that is enough is told.
    Where the plan was traced, a way that formulas are in doubt of is too, before it is told."""
    sorts = [list(sort) for sort in _sorts(plan)]
    traces = None if plan.traces is None else Traces("in doubt")
    single = [way for sort in sorts if (way := _first(plan, [(x,) for x in sort], traces))]
    if single:
        return single[:most]
    double = [_first(plan, _pairs(*two), traces) for two in combinations(sorts, 2)]
    return [way for way in double if way is not None][:most]


def _pairs(one: list[Change], other: list[Change]) -> list[tuple[Change, ...]]:
    """One of each, the smallest two first."""
    weighed = [(i + k, (a, b)) for i, a in enumerate(one) for k, b in enumerate(other)]
    return [pair for _, pair in sorted(weighed, key=lambda x: x[0])]


def _first(plan: Plan, tries: list[tuple[Change, ...]], traces: Traces | None) -> Way | None:
    for changes in tries:
        asked: tuple[Job, Cluster] | None = (plan.job, plan.cluster)
        for change in changes:
            asked = change.apply(*asked) if asked is not None else None
        if asked is not None and (candidate := fitting(plan, *asked, traces)) is not None:
            return Way(changes, candidate, asked[1])
    return None


def fitting(
    plan: Plan, job: Job, cluster: Cluster, traces: Traces | None = None
) -> Candidate | None:
    """A layout of `job` that fits all of `cluster`, if any does: one of the simplest. By what
    traces taught in `plan`, and by a trace of its own where `traces` has it so."""
    one = None if job.config.memory.optimizer_in_backward else 1  # sample at once: the least
    limits = Limits(ranks=cluster.devices, compile=False, positions=one)
    room, memory = room_of(cluster), plan.memory_of(job, cluster)
    models = Models(memory, lambda _: _NO_TIME, room)
    blocks = Space(job, cluster, limits).blocks()
    for block in sorted(blocks, key=lambda x: parts_of(x.frames[0].layout(1, 1))):
        while (entry := choose(search([block], models).bests.values(), "fewest")) is not None:
            if (
                traces is None
                or not traces.left
                or not traces.wanted(entry, memory, room, all_fit=True)
                or not traces.possible(entry, memory)
                or not traces.refutes(entry, job, cluster, memory, room)
            ):
                return assess(job, cluster, entry.layout, memory(entry.layout))
    return None


def _sorts(plan: Plan) -> Iterator[Iterator[Change]]:
    """Sorts of changes, the least first; within a sort the smallest first."""
    yield _unfixed(plan)
    yield _techniques_of(plan, ("int8-states", "int4-states", "bf16-pure"))
    yield _techniques_of(plan, ("lora", "qlora"))
    yield _shorter(plan)
    yield _more_devices(plan)
    yield _other_devices(plan)


def _unfixed(plan: Plan) -> Iterator[Change]:
    """What the config fixes of the layout, left to the plan."""
    config = plan.job.config
    free = MemorySection().model_copy(
        update={
            "optimizer_states": config.memory.optimizer_states,
            "optimizer_in_backward": config.memory.optimizer_in_backward,
        }
    )
    loose = (
        config.memory.activation_checkpointing != "auto" or config.memory.offload != OffloadTable()
    )
    if config.parallel != "auto" or loose or config.train.micro_batch_size != "auto":

        def apply(job: Job, cluster: Cluster) -> tuple[Job, Cluster]:
            train = job.config.train.model_copy(update={"micro_batch_size": "auto"})
            update = {"parallel": "auto", "memory": free, "train": train}
            return replace(job, config=job.config.model_copy(update=update)), cluster

        how = "leave parallel, memory and train.micro_batch_size to the plan (auto)"
        yield Change("auto", how, apply)


def _techniques_of(plan: Plan, names: tuple[str, ...]) -> Iterator[Change]:
    for name in names:
        technique = TECHNIQUES[name]

        def apply(
            job: Job, cluster: Cluster, change: Callable[..., object] = technique.change
        ) -> tuple[Job, Cluster]:
            return replace(job, config=change(job.config)), cluster  # type: ignore[arg-type]

        if adds(technique, plan.job.config):
            yield Change(name, f"allow {name} ({technique.keys})", apply)


def _shorter(plan: Plan) -> Iterator[Change]:
    length = plan.job.length // 2
    while length >= SHORTEST:

        def apply(job: Job, cluster: Cluster, to: int = length) -> tuple[Job, Cluster]:
            data = job.config.data.model_copy(update={"sequence_length": to})
            return replace(job, config=job.config.model_copy(update={"data": data})), cluster

        yield Change("length", f"samples of {length:,} tokens (data.sequence_length)", apply)
        length //= 2


def _more_devices(plan: Plan) -> Iterator[Change]:
    times = 2
    while times <= MOST:

        def apply(job: Job, cluster: Cluster, times: int = times) -> tuple[Job, Cluster]:
            return job, _grown(cluster, times)

        count = plan.cluster.devices * times
        yield Change("devices", f"{count} x {plan.cluster.device.name}", apply)
        times *= 2


def _grown(cluster: Cluster, times: int) -> Cluster:
    """So many times the devices: as the catalogue has nodes of them, or more nodes alike."""
    count = cluster.devices * times
    try:
        grown = read_cluster(f"{count}x{cluster.device.name}", cluster.price_per_hour)
    except RequestError:
        nodes = cluster.nodes * times
        return replace(
            cluster, nodes=nodes, name=f"{nodes}x{cluster.node.devices}x{cluster.device.name}"
        )
    return grown


def _other_devices(plan: Plan) -> Iterator[Change]:
    """The catalogue's larger devices, as many of them, the cheapest first."""
    here = plan.cluster.device
    larger = []
    for name in device_names():
        try:
            cluster = read_cluster(f"{plan.cluster.devices}x{name}")
        except RequestError:  # so many do not fill its nodes
            continue
        if cluster.device.kind == "gpu" and cluster.device.memory_bytes > here.memory_bytes:
            larger.append(cluster)
    for cluster in sorted(larger, key=lambda x: (x.price_per_hour or inf, x.device.memory_bytes)):

        def apply(job: Job, _: Cluster, instead: Cluster = cluster) -> tuple[Job, Cluster]:
            return job, instead

        yield Change("device", f"{cluster.devices} x {cluster.device.name}{_at(cluster)}", apply)


def _at(cluster: Cluster) -> str:
    price = cluster.price_per_hour
    return "" if price is None else f" ({price:g} {cluster.currency} an hour each)"
