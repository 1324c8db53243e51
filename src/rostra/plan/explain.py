"""Why a plan is as it is: what each technique would save and cost, why not the others, and what
would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rostra.errors import NoLayoutFits
from rostra.layout import Layout, refusals
from rostra.plan.job import Job
from rostra.plan.planner import Plan, assess
from rostra.plan.results import Candidate
from rostra.plan.shortage import shortage_told
from rostra.plan.space import Space
from rostra.plan.techniques import TECHNIQUES, adds
from rostra.plan.verdict import Verdict, Way, verdicts, ways_to_fit
from rostra.plan.words import in_yaml, signed_bytes, signed_share


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

    def in_words(self, step: float) -> dict[str, str]:
        """As a row of a table, beside a chosen layout whose step takes so many seconds."""
        row = {"technique": f"{'without' if self.used else 'with'} {self.technique}"}
        if self.candidate is None:
            return {**row, "memory": "", "time": "", "remark": f"not here: {self.reason}"}
        return {
            **row,
            "memory": signed_bytes(self.bytes),
            "time": signed_share(self.seconds / step),
            "remark": "" if self.fits else "does not fit",
        }


def effects(plan: Plan) -> list[Effect]:
    """Of each technique, what it would save and cost here: the layout next to the chosen one
    that has it, or has not."""
    if plan.chosen is None:
        return []
    found = []
    chosen = plan.chosen
    number = _variant_of(plan, chosen.layout)
    job = plan.jobs[number]
    base = plan.memory_of(job, plan.cluster, number)(chosen.layout).peak  # beside others untraced
    for name, used, other, variant in _neighbours(job, chosen.layout):
        if reason := _refused(plan, other):
            found.append(Effect(name, used, None, reason=reason))
            continue
        memory = plan.memory_of(variant, plan.cluster, number)(other)
        candidate = assess(variant, plan.cluster, other, memory)
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
    if layout.compute in ("fp8", "fp16") and layout.compute not in device.flops:
        return f"no {layout.compute} products on {device.name}"
    if layout.offload_optimizer != "none" and device.kind == "cpu":
        return "the host is the device"
    return None


def _variant_of(plan: Plan, layout: Layout) -> int:
    """The number of the job with the techniques that `layout` uses."""
    names = ("adapter", "quantization", "optimizer_states", "compute", "reduction")
    for number, job in enumerate(plan.jobs):
        settled = Space(job, plan.cluster).settled
        if all(settled[name] == getattr(layout, name) for name in names):
            return number
    return 0


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
    names = ("lora", "qlora", "int8-states", "fp16", "fp8")
    for name in names if layout.compute == "fp32" else (n for n in names if n != "fp16"):
        if adds(TECHNIQUES[name], job.config):
            config = TECHNIQUES[name].change(job.config)
            fields: dict[str, Any] = {
                "adapter": config.adapter.kind,
                "quantization": config.quantization.kind,
                "optimizer_states": config.memory.optimizer_states,
            }
            if name in ("fp16", "fp8"):
                fields["compute"] = name
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


@dataclass(frozen=True)
class Explanation:
    """A plan with all that is told beside it."""

    plan: Plan
    why_not: tuple[Verdict, ...]
    effects: tuple[Effect, ...]
    ways: tuple[Way, ...]  # to make it fit, where nothing does

    @property
    def config(self) -> list[str]:
        """The chosen layout as lines of a config."""
        folder = self.plan.job.config.memory.offload.path
        return [] if self.plan.chosen is None else in_yaml(self.plan.chosen.layout, folder)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.plan.to_dict(),
            "reason": None if self.plan.feasible else shortage_told(self.plan),
            "config": self.config,
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
