"""Memory by trace: the engine that would train, run for two steps on fake tensors.

A step is whole, as training takes it: all micro batches by the real schedule, the norm of the
gradients, the optimizer. The first brings the states into being; over the second every block of
memory is followed. Of a deep model two small depths are traced, and of many micro batches two
small numbers: see `rostra.plan.places`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from rostra.adapt.quantized import QuantizedLinear
from rostra.batch import Batch
from rostra.dry_run import Watch, fake_rank
from rostra.hardware.cluster import Cluster
from rostra.layout import Layout
from rostra.models.weights import model_on_meta
from rostra.parallel import Engine
from rostra.parallel.pipeline_split import balance, layer_costs
from rostra.plan.job import Job
from rostra.plan.places import Marks, Profile, extended, peak, profile
from rostra.plan.results import Memory

WHOLE = 8  # layers of a rank, and micro batches, up to which all are traced


def traced(job: Job, layout: Layout, cluster: Cluster) -> Memory:
    """Memory over a step of the rank that needs most, and its source `trace`.

    Nothing is told of the host, of loading and of saving. Layers are taken as they are
    uncompiled, fp8 as bf16.

    Raises RequestError for what cannot be trained, as `rostra.dry_run` does.
    """
    gpu = cluster.device.kind == "gpu"
    parts = _Parts(job.shape, layout)
    found = [peak(_Trace(job, layout, rank, parts, gpu).profile()) for rank in parts.ranks()]
    return Memory(max(found, key=lambda kinds: sum(kinds.values())), source="trace")


@dataclass(frozen=True)
class _Parts:
    """How the layers of a model lie on the ranks of a pipeline."""

    shape: PretrainedConfig
    layout: Layout

    @cached_property
    def depth(self) -> int:
        return int(self.shape.get_text_config().num_hidden_layers)

    @cached_property
    def period(self) -> int:
        """After so many layers all is as before."""
        kinds = getattr(self.shape.get_text_config(), "layer_types", None) or [""] * self.depth
        same = (
            n
            for n in range(1, self.depth + 1)
            if all(x == kinds[i % n] for i, x in enumerate(kinds))
        )
        kind, _, every = self.layout.activation_checkpointing.partition(":")
        return next(same) * (int(every) if kind == "every" else 1)

    @cached_property
    def _costs(self) -> tuple[float, float]:
        """Operations of a layer, and of the head."""
        costs = layer_costs(model_on_meta(with_depth(self.shape, 2)))
        return costs[0], costs[1] - costs[0]

    def own(self, depth: int, place: int) -> list[int]:
        """Layers in each stage of the ranks at `place` in the pipeline, of `depth` in all."""
        ranks, stages = self.layout.pipeline, self.layout.stages
        if ranks == 1:
            return [depth]
        layer, head = self._costs
        costs = [layer] * (depth - 1) + [layer + head]
        cuts = balance(costs, ranks * stages)
        return [cuts[n * ranks + place + 1] - cuts[n * ranks + place] for n in range(stages)]

    def ranks(self) -> Iterator[int]:
        """Those that may need most. Of equal stages the first, which waits longest for its
        backward passes; of ranks beside each other the first, which has the larger parts."""
        known = set()
        for place in range(self.layout.pipeline):
            last = place == self.layout.pipeline - 1
            kind = (tuple(self.own(self.depth, place)), place == 0, last)
            if kind not in known:
                yield place * (self.layout.world_size // self.layout.pipeline)
            known.add(kind)

    def depths(self, place: int) -> tuple[int, int, float] | None:
        """Two depths to be traced, and what part of the growth from one to the other the whole
        depth is; None where that is as well traced itself."""
        step, full = self.period, self.own(self.depth, place)
        if sum(full) <= WHOLE:
            return None
        if self.layout.pipeline == 1:
            first = next(n for n in range(3, 3 + step) if n % step == self.depth % step)
            small = first, first + step
            return (*small, (self.depth - first) / step) if small[1] < self.depth else None
        if step > 1:
            return None
        stages = self.layout.pipeline * self.layout.stages
        first = next(n for n in range(stages, self.depth) if min(self.own(n, place)) >= 3)
        one = self.own(first, place)
        for second in range(first + 1, self.depth):
            if {b - a for a, b in zip(one, self.own(second, place), strict=True)} == {1}:
                return first, second, (sum(full) - sum(one)) / len(one)
        return None

    def numbers(self) -> tuple[int, int, float] | None:
        """The same of the micro batches of a step."""
        count, ranks, name = self.layout.accumulation, self.layout.pipeline, ""
        if ranks == 1:  # the third is as the second
            return (2, 3, 0.0) if count > 2 else None
        name = self.layout.pipeline_schedule
        first, second = {"1f1b": (ranks, ranks + 1), "gpipe": (2, 3)}.get(
            name, (2 * ranks, 3 * ranks)
        )
        if count <= max(WHOLE, second):
            return None
        return first, second, (count - first) / (second - first)


@dataclass(frozen=True)
class _Trace:
    job: Job
    layout: Layout
    rank: int
    parts: _Parts
    gpu: bool

    def profile(self) -> Profile:
        numbers = self.parts.numbers()
        if numbers is None:
            return self._of(self.layout.accumulation)
        first, second, times = numbers
        one = self._of(first)
        return extended(one, self._of(second), times) if times else one

    def _of(self, count: int) -> Profile:
        """Of a step of `count` micro batches."""
        place = self.rank // (self.layout.world_size // self.layout.pipeline)
        depths = self.parts.depths(place)
        if depths is None:
            return self._run(self.job.shape, count)
        first, second, times = depths
        one, two = (self._run(with_depth(self.job.shape, n), count) for n in (first, second))
        return extended(one, two, times)

    def _run(self, shape: PretrainedConfig, count: int) -> Profile:
        layout = replace(self.layout, accumulation=count)
        size = layout.micro_batch * count * layout.data
        train = self.job.config.train.model_copy(update={"global_batch_size": size})
        config = self.job.config.model_copy(update={"train": train})
        with fake_rank(config, layout, shape, self.rank) as (engine, watch):
            marks, batch = Marks(engine, watch), _batch(layout, self.job.length)
            _step(engine, batch, marks)
            begun, before = len(watch.changes), _held(engine, watch)
            _step(engine, batch, marks)
            kind_of = before | _held(engine, watch)
            return profile(marks, begun, kind_of, all_live=self.gpu)


def with_depth(shape: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The same with fewer layers: the first ones."""
    shape = copy.deepcopy(shape)
    text = shape.get_text_config()
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = kinds[:layers]
    text.num_hidden_layers = layers
    return shape


def _batch(layout: Layout, length: int) -> Batch:
    """What a rank gets for a step."""
    rows = layout.micro_batch * layout.accumulation
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(tokens, tokens.clone(), torch.arange(length).expand(rows, -1))


def _step(engine: Engine, batch: Batch, marks: Marks) -> None:
    engine.forward_backward(batch)
    marks.watch.sent.clear()
    marks.note("norm")
    engine.gradient_norm()
    marks.note("update")
    engine.step(True)


def _held(engine: Engine, watch: Watch) -> dict[int, str]:
    """The kinds of the blocks that last from step to step."""
    model, optimizers = engine.measured()
    updated = [p for part in optimizers for group in part.param_groups for p in group["params"]]
    scales = [
        tensor
        for module in model.modules()
        if isinstance(module, QuantizedLinear)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name != "packed"
    ]
    found = {
        "optimizer": [*tree_leaves([dict(part.state) for part in optimizers]), *updated],
        "gradients": [p.grad for p in updated],
        "parameters": [*model.parameters(), *model.buffers()],
        "quantization": scales,
    }
    return {n: kind for kind, tensors in found.items() for n in watch.blocks(tensors)}
