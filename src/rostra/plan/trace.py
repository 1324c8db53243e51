"""Memory by trace: the engine that would train, run for a step on fake tensors.

Two steps are run, as training runs them: all micro batches, the gradients' norm, the optimizer.
The first brings the states into being; over the second, every block of memory is followed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rostra.batch import Batch
from rostra.dry_run import Watch, fake_rank
from rostra.hardware.cluster import Cluster
from rostra.layout import Layout
from rostra.parallel import TorchEngine
from rostra.plan.job import Job
from rostra.plan.results import KINDS, Memory


def traced(job: Job, layout: Layout, cluster: Cluster) -> Memory:
    """Memory of the rank that needs most, exactly: see the module.

    Raises RequestError for what cannot be trained, as `rostra.dry_run` does.
    """
    found = [trace_rank(job, layout, rank) for rank in _fullest(layout)]
    kinds = max(found, key=lambda kinds: sum(kinds.values()))
    return Memory(kinds, source="trace")


def _fullest(layout: Layout) -> Iterable[int]:
    """Of each stage of the pipeline, the rank that has the largest parts: the first."""
    each = layout.world_size // layout.pipeline
    return range(0, layout.world_size, each)


def trace_rank(job: Job, layout: Layout, rank: int) -> dict[str, int]:
    """Bytes by kind at the peak of a step."""
    with fake_rank(job.config, layout, job.shape, rank) as (engine, watch):
        batch = _batch(job, layout)
        _step(engine, batch)
        begun, held = len(watch.changes), _held(engine, watch)
        _step(engine, batch)
        return _at_peak(watch, begun, held, _held(engine, watch))


def _batch(job: Job, layout: Layout) -> Batch:
    """What a rank gets for a step."""
    rows = layout.micro_batch * layout.accumulation
    tokens = torch.zeros(rows, job.length, dtype=torch.int64)
    positions = torch.arange(job.length).expand(rows, -1)
    return Batch(tokens, tokens.clone(), positions)


def _step(engine: TorchEngine, batch: Batch) -> None:
    engine.forward_backward(batch)
    engine.gradient_norm()
    engine.step(True)


def _held(engine: TorchEngine, watch: Watch) -> dict[str, set[int]]:
    """The blocks of what lasts from step to step."""
    model, optimizers = engine.measured()
    updated = [p for part in optimizers for group in part.param_groups for p in group["params"]]
    states: list[Tensor] = tree_leaves([dict(part.state) for part in optimizers])
    parameters = watch.blocks([*model.parameters(), *model.buffers()])
    return {
        "parameters": parameters,
        "gradients": watch.blocks(p.grad for p in updated),
        "optimizer": watch.blocks([*states, *updated]) - parameters,
    }


def _at_peak(
    watch: Watch, begun: int, before: dict[str, set[int]], after: dict[str, set[int]]
) -> dict[str, int]:
    kind_of = {n: kind for held in (before, after) for kind, ns in held.items() for n in ns}
    now = dict.fromkeys(KINDS, 0)
    for number, size in watch.changes[:begun]:
        if number in kind_of:
            now[kind_of[number]] += size
    return _peak_after(watch, begun, kind_of, now)


def _peak_after(
    watch: Watch, begun: int, kind_of: dict[int, str], now: dict[str, int]
) -> dict[str, int]:
    there: dict[int, int] = {}  # blocks that are none of these, and were there before
    for number, size in watch.changes[:begun]:
        if number not in kind_of:
            there[number] = there.get(number, 0) + size
    peak = dict(now)
    for number, size in watch.changes[begun:]:
        if size < 0 and there.get(number):
            there[number] += size
            continue
        now[kind_of.get(number, "activations")] += size
        if sum(now.values()) > sum(peak.values()):
            peak = dict(now)
    return peak
