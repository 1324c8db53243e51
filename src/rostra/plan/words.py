"""A plan's figures in words: layouts, durations, money, and the rows that its tables are made of.
The terminal and the page say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from rostra.layout import KEYS, Layout
from rostra.plan.planner import Plan
from rostra.plan.results import KINDS, OUTSIDE, Candidate

TOLD = 10**6  # bytes below which nothing is told
_WIDTH = 80  # characters of a line of YAML
_PLACES = {"cpu": "the host", "nvme": "NVMe"}
# What a config or a technique settles, not the layout: told where layouts differ in it.
_SETTLED = (
    "compute", "reduction", "quantization", "adapter", "optimizer_states",
    "optimizer_in_backward",
)  # fmt: skip

SOURCES = {
    "formula": "by formulas",
    "linears": "by its matrices alone",
    "scaled": "by formulas, scaled as traces of others showed",
    "trace": "checked by a trace",
}


def words(layout: Layout) -> str:
    """A layout in a line, `full_shard 4, tensor 2, full checkpointing`: how the work is split,
    what is computed again, and what waits elsewhere."""
    return ", ".join(_parts(layout)) or "one process"


def words_apart(layouts: Sequence[Layout]) -> list[str]:
    """Layouts in words, with what their configs settle where it is not the same in all."""
    differ = [name for name in _SETTLED if len({getattr(x, name) for x in layouts}) > 1]
    plain = Layout(1, 1)
    told = []
    for layout in layouts:
        values = {name: getattr(layout, name) for name in differ}
        more = [
            name if value is True else f"{name} {value}"
            for name, value in values.items()
            if value != getattr(plain, name)
        ]
        told.append(", ".join([*_parts(layout), *more]) or "one process")
    return told


def _parts(x: Layout) -> Iterator[str]:
    if x.engine != "torch":
        yield x.engine
    if data := _data(x):
        yield data
    if x.tensor > 1:
        yield f"tensor {x.tensor}"
    if x.context > 1:
        yield f"context {x.context} ({x.context_method})"
    if x.pipeline > 1:
        stages = f", {x.stages} stages a rank" if x.stages > 1 else ""
        yield f"pipeline {x.pipeline} ({x.pipeline_schedule}{stages})"
    mode = x.activation_checkpointing
    if mode == "offload":
        yield "activations on the host"
    elif mode != "none":
        yield f"{mode} checkpointing"
    places = {"parameters": x.offload_parameters, "optimizer": x.offload_optimizer}
    for place, name in _PLACES.items():
        if there := " and ".join(what for what, at in places.items() if at == place):
            yield f"{there} on {name}"
    if x.compile:
        yield "compiled"


def _data(x: Layout) -> str:
    """How the ranks of the data hold the model."""
    match x.sharding:
        case "no_shard":
            return f"replicate {x.replicate}" if x.replicate > 1 else ""
        case "hybrid_shard":
            return f"hybrid_shard {x.replicate} x {x.shard}"
        case _:
            return f"{x.sharding} {x.shard}" if x.shard > 1 else x.sharding


def duration(hours: float) -> str:
    """Three digits in the unit that suits."""
    seconds = 3600 * hours
    units = (("days", 86400.0, 3.0), ("h", 3600.0, 1.5), ("min", 60.0, 1.5), ("s", 1.0, 1.0))
    for unit, size, least in units:
        if seconds >= least * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(1000 * seconds)} ms"


def amount(money: float) -> str:
    return f"{money:,.0f}" if money >= 100 else f"{money:,.2f}"


def _digits(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def headline(plan: Plan) -> list[str]:
    """Model, work and hardware, a line for each."""
    job, cluster = plan.job, plan.cluster
    price = cluster.price_per_hour
    cost = "" if price is None else f", {price:g} {cluster.currency} an hour each"
    measured = ", as measured here" if cluster.calibrated else ""
    tokens = "" if job.tokens is None else f", {job.tokens:,} tokens in all"
    name = job.config.model.pretrained or job.config.model.preset or job.sizes.family
    if name.startswith(("/", ".", "~")):  # a folder
        name = Path(name).name or name
    return [
        f"{name} on {cluster.name or cluster.device.name}",
        f"{job.sizes.parameters:,} parameters, {cluster.devices} x {cluster.device.name} of "
        f"{decimal(cluster.device.memory_bytes)}{cost}{measured}",
        f"{job.global_batch:,} sample{'s' * (job.global_batch > 1)} of {job.length:,} tokens a "
        f"step{tokens}",
    ]


def counts(plan: Plan) -> str:
    """How the choice was made."""
    assert plan.chosen is not None
    layouts = f"{plan.considered:,} layout{'s' * (plan.considered > 1)}"
    return (
        f"{layouts} considered in {plan.search_seconds:.1f} s, "
        f"{plan.found.fitting:,} of them fit. The first is {_choice(plan)}. Its memory is "
        f"{SOURCES[plan.chosen.memory.source]}{untraced(plan, plan.chosen.layout)}"
    )


def untraced(plan: Plan, layout: Layout) -> str:
    """Why `layout` was not traced, where that was tried: what to put behind its memory."""
    traces = plan.traces
    if traces is None or any(memory.traced(layout) for memory in plan.memories):
        return ""
    if why := traces.why_not(layout):
        return f"; a trace failed: {why}"
    if not traces.left:
        return f"; {traces.made} traces each changed the choice, and no more were made"
    return ""


def _choice(plan: Plan) -> str:
    """What the chosen layout is among those that fit, and which it is preferred to."""
    assert plan.chosen is not None
    named = {"fastest": "fastest", "cheapest": "cheapest", "fewest": "one on the fewest devices"}
    goal = f"the {named[plan.goal]}"
    if (best := plan.narrowly) is None:
        return goal
    devices = plan.chosen.layout.world_size, best.layout.world_size
    gain, better = 1 - best.time.step / plan.chosen.time.step, "quicker"
    if plan.goal == "cheapest":
        gain, better = 1 - (1 - gain) * devices[1] / devices[0], "cheaper"
    if gain < 0.001:
        return goal
    on = "" if devices[0] == devices[1] else f" on {devices[1]} devices"
    name = words_apart([plan.chosen.layout, best.layout])[1]
    return f"{goal} but for what gains too little ({name}{on}: {gain:.1%} {better})"


def row_of(plan: Plan, x: Candidate, name: str | None = None) -> dict[str, str]:
    """A candidate in words, by column."""
    layout = x.layout
    return {
        "layout": name or words(layout),
        "devices": str(layout.world_size),
        "samples": f"{layout.micro_batch} x {layout.accumulation}",
        "memory": decimal(x.memory.peak),
        "step": duration(x.time.step / 3600),
        "tokens/s": f"{x.tokens_per_second:,.0f}",
        "MFU": f"{x.mfu:.0%}",
        **({} if x.hours is None else {"run": duration(x.hours)}),
        **({} if x.price is None else {plan.cluster.currency: amount(x.price)}),
    }


def elsewhere(x: Candidate) -> str:
    """What an offloaded layout needs beside its device, for each rank; nothing of others."""
    host = x.memory.host_peak if x.memory.host >= TOLD else 0
    sizes = {"host memory": host, "NVMe": x.memory.nvme}
    return " and ".join(f"{decimal(size)} of {what}" for what, size in sizes.items() if size)


def rows_of(plan: Plan, shown: Sequence[Candidate]) -> list[dict[str, str]]:
    names = words_apart([x.layout for x in shown])
    return [row_of(plan, x, name) for x, name in zip(shown, names, strict=True)]


def kinds_of(shown: Sequence[Candidate]) -> list[str]:
    """The kinds of memory of which one of them has as much as is told, in their order."""
    peaks = [x.memory.peak_kinds for x in shown]
    return [k for k in (*KINDS, *OUTSIDE) if any(peak.get(k, 0) >= TOLD for peak in peaks)]


def signed_bytes(size: int) -> str:
    return f"{'+' if size >= 0 else '-'}{decimal(abs(size))}" if abs(size) >= TOLD else "same"


def signed_share(share: float) -> str:
    return f"{share:+.0%}" if abs(share) >= 0.005 else "same"


def in_yaml(layout: Layout, folder: str | None = None) -> list[str]:
    """The layout as lines of a config. What waits on NVMe does so in `folder`; where there is
    none yet, a comment says what to put there."""
    plain, config = Layout(1, 1), dict[str, Any]()
    for name, key in KEYS.items():
        value = getattr(layout, name)
        if name == "micro_batch" or value != getattr(plain, name):
            _put(config, key, str(value).lower() if isinstance(value, bool) else str(value))
    if "parallel" in config and layout.shard > 1 and layout.sharding == "full_shard":
        del config["parallel"]["sharding"]  # what `shard` alone says
    if "nvme" in (layout.offload_parameters, layout.offload_optimizer):
        named = json.dumps(folder) if folder else "/nvme  # a folder on your NVMe"
        _put(config, "memory.offload.path", named)
    return list(_lines(config))


def _put(config: dict[str, Any], key: str, value: str) -> None:
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value


def _lines(config: dict[str, Any], indent: str = "") -> Iterator[str]:
    """A table on one line, where it is short and has no comment."""
    for key, value in config.items():
        line = f"{indent}{key}: {_flow(value)}"
        if isinstance(value, dict) and (len(line) > _WIDTH or "#" in line):
            yield f"{indent}{key}:"
            yield from _lines(value, f"{indent}  ")
        else:
            yield line


def _flow(value: str | dict[str, Any]) -> str:
    if isinstance(value, str):
        return value
    return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
