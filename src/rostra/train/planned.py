"""The plan of a run that starts now: on this machine, on the ranks that were started."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from rostra.config import Config
from rostra.errors import NoLayoutFits
from rostra.hardware import Cluster, this_cluster
from rostra.layout import Layout
from rostra.plan.job import Job, job_of
from rostra.plan.planner import Plan, assess, make_plan
from rostra.plan.shortage import shortage_told
from rostra.plan.space import Limits, Space
from rostra.train.choose import POSITIONS, choose_layout, full_rows


@dataclass(frozen=True)
class Start:
    """What is known when a run starts or goes on."""

    config: Config
    shape: PretrainedConfig  # of the model that was built
    parameters: int
    tokens: int  # of the whole run
    device: torch.device
    ranks: int
    local_ranks: int  # on this machine
    before: Layout | None = None  # with which the run was going on


def plan_run(start: Start, notice: Callable[[str], None]) -> tuple[Layout, Plan | None]:
    """The layout to train with, and the plan that chose it; without one, when a model is beyond
    the planner, which `notice` is told.

    What the config leaves open the plan decides. A run that goes on keeps its layout where the
    config still allows it, so that it ends as if it had never stopped. Raises RequestError for a
    config that is none for these ranks; NoLayoutFits when nothing fits and the config leaves
    the layout open.
    """
    sound = choose_layout(start.config, start.device, start.parameters, start.tokens, start.ranks)
    limits = Limits(
        ranks=start.ranks,
        compile=sound.compile,
        positions=POSITIONS if start.device.type == "cpu" else None,
        one_shape=start.config.data.packed not in ("none", "chunk") or full_rows(start.config),
        engines=("torch",),
        nvme=False,
    )
    try:
        job, cluster = _job(start, sound), _cluster(start, notice)
        kept = None if start.before is None else _kept(start.before, job, cluster, limits)
        if kept is not None:
            plan = make_plan(job, cluster, limits=limits)
            return kept, replace(plan, chosen=assess(job, cluster, kept))
        plan = make_plan(job, cluster, limits=limits, trace="in doubt")
        if plan.chosen is None:
            plan = _unfitting(plan, sound, notice)
    except NoLayoutFits:
        raise
    except Exception as error:  # a model of an unknown family must train all the same
        notice(f"trains without a plan, which cannot be made ({type(error).__name__}: {error})")
        return sound, None
    assert plan.chosen is not None
    return plan.chosen.layout, plan


def _job(start: Start, sound: Layout) -> Job:
    """The job as it runs here, precision decided."""
    config = start.config
    precision = config.precision.model_copy(update={"compute": sound.compute})
    job = job_of(config.model_copy(update={"precision": precision}), start.shape)
    return replace(job, tokens=start.tokens)


def _cluster(start: Start, notice: Callable[[str], None]) -> Cluster:
    """The machines of the ranks: all like this one."""
    here = this_cluster(start.local_ranks, notice=notice)
    nodes = math.ceil(start.ranks / start.local_ranks)
    return here if nodes == 1 else replace(here, nodes=nodes, name=f"{nodes}x{here.name}")


def _kept(before: Layout, job: Job, cluster: Cluster, limits: Limits) -> Layout | None:
    before = replace(before, compile=bool(limits.compile))
    return before if before in Space(job, cluster, limits) else None


def _unfitting(plan: Plan, sound: Layout, notice: Callable[[str], None]) -> Plan:
    """Where nothing fits: with a layout that the config fixes, try it all the same."""
    config = plan.job.config
    if plan.found.nearest() is not None:
        if config.parallel == "auto" and config.train.micro_batch_size == "auto":
            raise NoLayoutFits(
                f"{shortage_told(plan)}. `rostra plan` says what would make it fit; a layout that "
                "`parallel` and `train.micro_batch_size` fix is tried whatever the plan says"
            )
        notice(f"{shortage_told(plan)}; trying it all the same, as the config fixes the layout")
    memory = plan.memory_of(plan.job, plan.cluster)(sound)
    return replace(plan, chosen=assess(plan.job, plan.cluster, sound, memory))
