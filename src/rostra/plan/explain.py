"""A plan for people: what it chose and why, memory by kind, and what each technique would save
and cost here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from rostra.errors import NoLayoutFits
from rostra.layout import KEYS, Layout, refusals
from rostra.plan.job import Job
from rostra.plan.planner import Plan, assess
from rostra.plan.results import KINDS, Candidate
from rostra.plan.shortage import shortage_told
from rostra.plan.space import Space
from rostra.plan.techniques import TECHNIQUES, adds
from rostra.plan.verdict import Verdict, Way, verdicts, ways_to_fit

BAR = 48  # characters for all of a device's memory
COLOURS = {
    "parameters": "blue", "quantization": "cyan", "gradients": "green", "optimizer": "yellow",
    "activations": "red", "logits": "magenta", "gathered": "bright_blue",
    "communication": "bright_green", "reserved": "white",
}  # fmt: skip
# In a place without colours, a letter of the kind fills its part of the bar.
LETTERS = {
    "parameters": "P", "quantization": "Q", "gradients": "G", "optimizer": "O",
    "activations": "A", "logits": "L", "gathered": "g", "communication": "c", "reserved": "r",
}  # fmt: skip


@dataclass(frozen=True)
class Effect:
    """What a technique, used or left out, would change of the chosen layout. Bytes of a device's
    peak and seconds of a step, as differences; without a candidate, `reason` says why not."""

    technique: str
    used: bool  # by the chosen layout: the difference is that of leaving it out
    candidate: Candidate | None
    bytes: int = 0
    seconds: float = 0.0
    fits: bool = True
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "technique": self.technique,
            "used": self.used,
            "memory_bytes": self.bytes if self.candidate else None,
            "step_seconds": self.seconds if self.candidate else None,
            "fits": self.fits if self.candidate else None,
            "reason": self.reason,
        }


def effects(plan: Plan) -> list[Effect]:
    """Of each technique, what it would save and cost here: the layout next to the chosen one
    that has it, or has not."""
    if plan.chosen is None:
        return []
    found = []
    chosen = plan.chosen
    job = _job_of(plan, chosen.layout)
    for name, used, other, variant in _neighbours(job, chosen.layout):
        if reason := _refused(plan, other):
            found.append(Effect(name, used, None, reason=reason))
            continue
        candidate = assess(variant, plan.cluster, other)
        base = assess(job, plan.cluster, chosen.layout).memory.peak  # formula beside formula
        found.append(
            Effect(
                name,
                used,
                candidate,
                candidate.memory.peak - base,
                candidate.time.step - chosen.time.step,
                not plan.room.shortage(candidate.memory, other.world_size),
            )
        )
    return found


def _refused(plan: Plan, layout: Layout) -> str | None:
    """Why `layout` is none for the plan's devices, in a few words."""
    if refused := refusals(layout):
        return refused[0].name
    device = plan.cluster.device
    if layout.compute == "fp8" and "fp8" not in device.flops:
        return f"no float8 products on {device.name}"
    if layout.offload_optimizer != "none" and device.kind == "cpu":
        return "the host is the device"
    return None


def _job_of(plan: Plan, layout: Layout) -> Job:
    """The job with the techniques that `layout` uses."""
    names = ("adapter", "quantization", "optimizer_states", "compute", "reduction")
    for job in plan.jobs:
        settled = Space(job, plan.cluster).settled
        if all(settled[name] == getattr(layout, name) for name in names):
            return job
    return plan.job


def _neighbours(job: Job, layout: Layout) -> Iterator[tuple[str, bool, Layout, Job]]:
    """Technique, whether `layout` has it, the layout that differs in it, and its job."""
    mode, spread = layout.activation_checkpointing, layout.shard * layout.replicate
    for name in dict.fromkeys((mode, "selective:operations", "full")):
        if name != "none":
            other = replace(layout, activation_checkpointing="none" if mode == name else name)
            yield f"checkpointing {name}", mode == name, other, job
    if spread * layout.context > 1:
        sharded = layout.sharding == "full_shard"
        way: dict[str, Any] = {"sharding": "full_shard", "shard": spread, "replicate": 1}
        if sharded:
            way = {"sharding": "no_shard", "shard": 1, "replicate": spread}
        yield "full_shard", sharded, replace(layout, **way), job
    offloaded = layout.offload_optimizer != "none"
    place = "none" if offloaded else "cpu"
    moved: dict[str, Any] = {"offload_optimizer": place}
    if layout.offload_parameters != "none":
        moved["offload_parameters"] = place
    yield "offload", offloaded, replace(layout, **moved), job
    for axis in ("tensor", "pipeline"):
        if (split := _split(layout, axis)) is not None:
            yield axis, getattr(layout, axis) > 1, split, job
    compiled = replace(layout, compile=not layout.compile)
    yield "compile", layout.compile, compiled, job
    for name in ("lora", "qlora", "int8-states", "fp8"):
        if adds(TECHNIQUES[name], job.config):
            config = TECHNIQUES[name].change(job.config)
            fields: dict[str, Any] = {
                "adapter": config.adapter.kind,
                "quantization": config.quantization.kind,
                "optimizer_states": config.memory.optimizer_states,
            }
            if name == "fp8":
                fields["compute"] = "fp8"
            yield name, False, replace(layout, **fields), replace(job, config=config)


def _split(layout: Layout, axis: str) -> Layout | None:
    """With two ranks moved from the data to `axis`, or all of its ranks moved back."""
    schedule: dict[str, Any] = {}
    if axis == "pipeline":
        schedule = {"pipeline_schedule": "1f1b", "stages": 1}
    along = "replicate" if layout.sharding == "no_shard" else "shard"
    ranks = getattr(layout, axis)
    if ranks > 1:
        schedule |= {"pipeline_schedule": "none"} if schedule else {}
        sizes = {axis: 1, along: getattr(layout, along) * ranks}
    elif getattr(layout, along) % 2 == 0:
        sizes = {axis: 2, along: getattr(layout, along) // 2}
    else:
        return None
    other = replace(layout, **{**schedule, **sizes})
    rows = layout.accumulation * layout.micro_batch * layout.data / other.data
    return replace(other, accumulation=max(1, round(rows / layout.micro_batch)))


def in_yaml(layout: Layout) -> list[str]:
    """The layout as lines of a config."""
    plain, sections = Layout(1, 1), dict[str, list[str]]()
    for name, key in KEYS.items():
        value = getattr(layout, name)
        if name == "micro_batch" or value != getattr(plain, name):
            section, _, inner = key.partition(".")
            value = str(value).lower() if isinstance(value, bool) else value
            sections.setdefault(section, []).append(f"{inner}: {value}")
    if "parallel" in sections and layout.shard > 1 and layout.sharding == "full_shard":
        sections["parallel"].remove("sharding: full_shard")  # what `shard` alone says
    return [f"{name}: {{{', '.join(_nested(inner))}}}" for name, inner in sections.items()]


def _nested(keys: list[str]) -> Iterator[str]:
    """`offload.optimizer: cpu` as `offload: {optimizer: cpu}`."""
    tables: dict[str, list[str]] = {}
    for key in keys:
        name, _, value = key.partition(": ")
        outer, dot, inner = name.partition(".")
        if dot:
            tables.setdefault(outer, []).append(f"{inner}: {value}")
        else:
            yield key
    yield from (f"{name}: {{{', '.join(inner)}}}" for name, inner in tables.items())


@dataclass(frozen=True)
class Explanation:
    """A plan with all that is told beside it."""

    plan: Plan
    why_not: tuple[Verdict, ...]
    effects: tuple[Effect, ...]
    ways: tuple[Way, ...]  # to make it fit, where nothing does

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.plan.to_dict(),
            "reason": None if self.plan.feasible else shortage_told(self.plan),
            "config": [] if self.plan.chosen is None else in_yaml(self.plan.chosen.layout),
            "techniques": [x.to_dict() for x in self.effects],
            "why_not": [x.to_dict() for x in self.why_not],
            "nearest_feasible": [x.to_dict() for x in self.ways],
        }

    def check(self) -> None:
        """Raises NoLayoutFits when nothing fits, with the least change that helps."""
        if not self.plan.feasible:
            near = f"; the nearest that fits: {self.ways[0].how}" if self.ways else ""
            raise NoLayoutFits(shortage_told(self.plan) + near)


def explain(plan: Plan) -> Explanation:
    """Why a plan is as it is; takes a moment, and seconds where nothing fits."""
    ways = () if plan.feasible else tuple(ways_to_fit(plan))
    return Explanation(plan, tuple(verdicts(plan)), tuple(effects(plan)), ways)


def show(told: Explanation) -> None:
    """Print a plan on standard output."""
    plan, console = told.plan, Console(highlight=False)
    console.print(Text(headline(plan)))
    for note in plan.notes:
        console.print(Text(f"assumed: {note}", style="dim"))
    console.print()
    if plan.chosen is None:
        console.print(_ways(told.ways), "", sep="\n")
        return
    shown = [plan.chosen, *plan.alternatives]
    parts: list[Any] = [
        Text("\n".join(in_yaml(plan.chosen.layout)), style="bold"),
        _layouts(plan, shown),
        _bars(plan, shown[:4], console),
        _effects(plan, told.effects),
    ]
    if misses := [verdict for verdict in told.why_not if verdict.candidate is None]:
        parts.append(_misses(misses[:8]))
    parts.append(Text(counts(plan), style="dim"))
    for part in parts:
        console.print(part, "", sep="\n")


def headline(plan: Plan) -> str:
    job, cluster = plan.job, plan.cluster
    price = cluster.price_per_hour
    cost = "" if price is None else f", {price:g} {cluster.currency} an hour each"
    measured = "" if not cluster.calibrated else ", as measured here"
    tokens = "" if job.tokens is None else f", {job.tokens:,} tokens"
    return (
        f"{job.sizes.family} of {job.sizes.parameters:,} parameters: "
        f"{job.global_batch:,} samples of {job.length:,} a step{tokens}\n"
        f"{cluster.name or cluster.device.name}: {decimal(cluster.device.memory_bytes)} each"
        f"{cost}{measured}"
    )


def row_of(plan: Plan, x: Candidate) -> dict[str, str]:
    """A candidate in words, by column."""
    layout = x.layout
    return {
        "layout": layout.describe(),
        "devices": str(layout.world_size),
        "samples": f"{layout.micro_batch} x {layout.accumulation}",
        "memory": decimal(x.memory.peak),
        "step": f"{x.time.step:.3g} s",
        "tokens/s": f"{x.tokens_per_second:,.0f}",
        "MFU": f"{x.mfu:.0%}",
        **({} if x.hours is None else {"hours": f"{x.hours:,.3g}"}),
        **({} if x.price is None else {plan.cluster.currency: f"{x.price:,.0f}"}),
    }


def _layouts(plan: Plan, shown: list[Candidate]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    rows = [row_of(plan, x) for x in shown]
    for index, name in enumerate(rows[0]):
        justify: Any = "left" if index == 0 else "right"
        table.add_column(name, header_style="bold", justify=justify, overflow="fold")
    names = apart([row["layout"] for row in rows])
    for index, (row, name) in enumerate(zip(rows, names, strict=True)):
        cells = {**row, "layout": f"{index + 1}  {name}"}
        table.add_row(*map(Text, cells.values()), style="bold" if index == 0 else None)
    return table


def apart(described: list[str]) -> list[str]:
    """Layouts in words without what is the same in all of them, where there are several."""
    each = [text.split(", ") for text in described]
    common = set(each[0]).intersection(*each) if len(each) > 1 else set()
    return [", ".join(p for p in parts if p not in common) or "as all" for parts in each]


def _bars(plan: Plan, shown: list[Candidate], console: Console) -> Group:
    """Memory by kind, stacked, over the memory of a device."""
    colours = console.color_system is not None
    room = plan.cluster.device.memory_bytes
    lines = []
    for number, candidate in enumerate(shown):
        line = Text(f"{number + 1}  ")
        for kind, width in widths(candidate, room, BAR).items():
            mark = "█" if colours else LETTERS[kind]
            line.append(mark * width, style=COLOURS[kind])
        used = sum(widths(candidate, room, BAR).values())
        line.append("·" * max(0, BAR - used) + "|", style="dim")
        line.append(f" {decimal(candidate.memory.peak)} of {decimal(room)}")
        lines.append(line)
    kinds = {kind for x in shown for kind, size in x.memory.kinds.items() if size}
    legend = Text("   ")
    for kind in KINDS:
        if kind in kinds:
            legend.append("█ " if colours else f"{LETTERS[kind]} ", style=COLOURS[kind])
            size = shown[0].memory.kinds.get(kind, 0)
            legend.append(f"{kind} {decimal(size)}   ")
    return Group(*lines, legend)


def widths(candidate: Candidate, room: int, total: int) -> dict[str, int]:
    """Characters for each kind of memory, of `total` for all of `room`, rounded at their ends."""
    found, so_far, drawn = {}, 0, 0
    for kind in KINDS:
        so_far += candidate.memory.kinds.get(kind, 0)
        end = round(total * so_far / room)
        found[kind], drawn = end - drawn, end
    return found


def _effects(plan: Plan, found: Sequence[Effect]) -> Table:
    assert plan.chosen is not None
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("technique", "memory of a device", "time of a step", ""):
        table.add_column(name, header_style="bold", justify="left")
    for x in found:
        row = effect_row(x, plan.chosen.time.step)
        table.add_row(*list(row.values())[:3], Text(row["remark"], style="dim"))
    return table


def effect_row(x: Effect, step: float) -> dict[str, str]:
    """An effect in words, beside a chosen layout whose step takes so long."""
    row = {"technique": f"{'without' if x.used else 'with'} {x.technique}"}
    if x.candidate is None:
        return {**row, "memory": "", "time": "", "remark": f"not here: {x.reason}"}
    return {
        **row,
        "memory": f"{'+' if x.bytes >= 0 else '-'}{decimal(abs(x.bytes))}",
        "time": f"{x.seconds / step:+.0%}",
        "remark": "" if x.fits else "does not fit",
    }


def _misses(misses: list[Verdict]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("why not", header_style="bold")
    table.add_column("")
    for verdict in misses:
        table.add_row(Text(verdict.strategy), Text(verdict.reason))
    return table


def _ways(ways: Sequence[Way]) -> Table | Text:
    if not ways:
        return Text("No one or two changes make it fit.")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("what would make it fit", "memory of a device", "layout"):
        table.add_column(name, header_style="bold", overflow="fold")
    for way in ways:
        memory = way.candidate.memory
        table.add_row(Text(way.how), decimal(memory.peak), Text(way.candidate.layout.describe()))
    return table


def counts(plan: Plan) -> str:
    assert plan.chosen is not None
    goal = {"fastest": "fastest", "cheapest": "cheapest", "fewest": "on the fewest devices"}
    source = "checked by a trace" if plan.chosen.memory.source == "trace" else "by formulas"
    return (
        f"{plan.considered:,} layouts considered in {plan.search_seconds:.1f} s, "
        f"{plan.found.fitting:,} of them fit; the first is the {goal[plan.goal]}, "
        f"its memory {source}"
    )
