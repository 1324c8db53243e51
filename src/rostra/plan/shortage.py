"""Why a plan found nothing: what there is too little of, or what cannot be combined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.filesize import decimal

from rostra.build.check import check_layout
from rostra.errors import RequestError
from rostra.layout import Layout, refusals
from rostra.plan.axes import choose_axes
from rostra.plan.planner import Plan
from rostra.plan.results import Memory
from rostra.plan.search import Room
from rostra.plan.words import untraced, words

_NEEDS = {  # by where that comes from
    "formula": "needs",
    "linears": "needs, by its matrices alone,",
    "scaled": "needs, as traces of others show,",
    "trace": "needs, as its trace shows,",
}

LOADED, SAVED = " while the model is loaded", " while a checkpoint is saved"


def shortage_told(plan: Plan) -> str:
    """Why nothing fits, in a sentence."""
    where = plan.cluster.name or plan.cluster.device.name
    miss = plan.found.nearest()
    if miss is None:
        return (
            f"no layout of this config is legal on {where}: {_refused(plan)}; leave what is "
            "fixed to the plan (parallel: auto)"
        )
    memory, samples = plan.candidate(miss).memory, miss.layout.micro_batch
    return (
        f"no layout fits {where}: of {plan.considered:,} the nearest ({words(miss.layout)}; "
        f"{samples} sample{'s' * (samples > 1)} at once) {_NEEDS[memory.source]} "
        f"{' and '.join(_lacking(plan.room, memory, miss.layout.world_size))}"
        f"{untraced(plan, miss.layout)}"
    )


def _lacking(room: Room, memory: Memory, ranks: int) -> Iterator[str]:
    """What a layout needs of each kind of memory that there is too little of."""
    if memory.peak > room.device:
        kinds = sorted(memory.kinds.items(), key=lambda x: -x[1])[:3]
        what = "; " + ", ".join(f"{kind} {decimal(size)}" for kind, size in kinds if size)
        when = ""
        if memory.total <= room.device:
            what, loads = "", memory.loading >= memory.saving
            when = LOADED if loads else SAVED
        yield f"{decimal(memory.peak)} on a device{when} (which has {decimal(room.device)}{what})"
    if memory.host_peak > (host := room.host_of(ranks)):
        uses = {memory.host: " while it trains", memory.loading_host: LOADED}
        when = uses.get(memory.host_peak, SAVED)
        needed = decimal(memory.host_peak)
        yield f"{needed} of host memory{when} (a rank has {decimal(host)})"
    if memory.nvme > (nvme := room.nvme_of(ranks)):
        yield f"{decimal(memory.nvme)} of NVMe (a rank has {decimal(nvme)})"


def _refused(plan: Plan) -> str:
    """Why none of what the config fixes is legal."""
    table, ranks = plan.job.config.parallel, plan.cluster.devices
    if table != "auto":
        try:
            axes = choose_axes(table, ranks)
            schedule = table.schedule or ("1f1b" if axes["pipeline"] > 1 else "none")
            fixed: dict[str, Any] = {"engine": table.engine, "stages": table.stages}
            layout = Layout(1, axes["pipeline"], pipeline_schedule=schedule, **axes, **fixed)
            if refused := refusals(layout):
                return refused[0](layout)
            check_layout(plan.job.config, layout, plan.job.shape)
        except RequestError as error:
            return str(error)
    return "what `parallel`, `memory` and `train.global_batch_size` fix cannot be combined there"
