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
from rostra.plan.memory import MemoryModel
from rostra.plan.places import Marks, Profile, extended, peak, profile
from rostra.plan.results import Memory

WHOLE = 8  # layers of a rank, and micro batches, up to which all are traced
INPUTS = 3 * 8  # bytes of a position: its token, its label, where it is in its document


def traced(job: Job, layout: Layout, cluster: Cluster) -> Memory:
    """Memory over a step of the rank that needs most, and its source `trace`.

    Nothing is told of the host, of loading and of saving, nor of what a device keeps beside
    tensors. fp8 is taken as bf16. What a compiler keeps no trace sees: for a compiled layout the
    answer is that of the closed formulas, with their source.

    Raises RequestError for what cannot be trained, as `rostra.dry_run` does.
    """
    if layout.compile:
        return MemoryModel(job, cluster)(layout)
    gpu = cluster.device.kind == "gpu"
    job = replace(job, shape=_in_kernel(job.shape)) if gpu else job
    places = _Parts(job.shape, layout).places()
    found = [peak(_Trace(job, layout, place, gpu).profile()) for place in places]
    kinds = max(found, key=lambda kinds: sum(kinds.values()))
    return Memory(kinds, source="trace")


def _in_kernel(shape: PretrainedConfig) -> PretrainedConfig:
    """Without the dropout of attention: a GPU's kernels draw it again from a seed, while the
    CPU's, which a trace runs, would keep all scores for it."""
    shape = copy.deepcopy(shape)
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(shape.get_text_config(), name, None):
            setattr(shape.get_text_config(), name, 0.0)
    return shape


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
        same = (n for n in range(1, self.depth) if kinds[n:] == kinds[:-n])
        kind, _, every = self.layout.activation_checkpointing.partition(":")
        return next(same, self.depth) * (int(every) if kind == "every" else 1)

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
        cuts = balance([layer] * (depth - 1) + [layer + head], ranks * stages)
        return [cuts[n * ranks + place + 1] - cuts[n * ranks + place] for n in range(stages)]

    def places(self) -> Iterator[int]:
        """Those in the pipeline that may need most: of equal stages the first, which waits
        longest for its backward passes."""
        known = set()
        for place in range(self.layout.pipeline):
            last = place == self.layout.pipeline - 1
            kind = (tuple(self.own(self.depth, place)), place == 0, last)
            if kind not in known:
                yield place
            known.add(kind)

    def depths(self, place: int, wanted: list[int]) -> tuple[list[int], float]:
        """Depths of which one or two are traced for a rank at `place` that has `wanted` layers,
        and how often the growth from the first to the second is added to the first."""
        if sum(wanted) > WHOLE and self.layout.pipeline == 1:
            first = next(n for n in range(3, 3 + self.period) if (wanted[0] - n) % self.period == 0)
            if first + self.period < wanted[0]:
                return [first, first + self.period], (wanted[0] - first) / self.period
        if self.layout.pipeline == 1:
            return [self.depth], 0
        ranks = self.layout.pipeline * self.layout.stages
        possible = range(ranks, self.depth + 1)
        if sum(wanted) > WHOLE and self.period == self.layout.stages == 1:
            small = [next(n for n in possible if self.own(n, place) == [few]) for few in (3, 4)]
            return small, wanted[0] - 3
        return [min(possible, key=lambda n: abs(sum(self.own(n, place)) - sum(wanted)))], 0


@dataclass(frozen=True)
class _Trace:
    """Of the first of the ranks that stand at `place` in the pipeline."""

    job: Job
    layout: Layout
    place: int
    gpu: bool

    def profile(self) -> Profile:
        """With all micro batches of the layout, which are traced as fewer."""
        traced, times = self._smaller()
        found, *larger = (self._deep(*each) for each in traced)
        counted = traced[0][0].accumulation
        if larger:
            found = extended(found, larger[0], times)
            counted += round(times * (traced[1][0].accumulation - counted))
        # what is cut into micro batches: on a GPU it is brought there, in a pipeline put together
        uncounted = self.layout.accumulation - counted if self.layout.pipeline > 1 else 0
        rows = uncounted + self.gpu * self.layout.accumulation
        inputs = INPUTS * rows * self.layout.micro_batch * self.job.length
        away = dict.fromkeys(_away(self.layout), 0) if self.gpu else {}
        return {
            at: kinds | {"activations": kinds["activations"] + inputs} | away
            for at, kinds in found.items()
        }

    def _smaller(self) -> tuple[list[tuple[Layout, int]], float]:
        """A layout with fewer micro batches that needs as much, and the place in its pipeline; or
        two, and how often the growth from one to the other is added."""
        x, ranks, place = self.layout, self.layout.pipeline, self.place
        count = x.accumulation

        def of(*numbers: int) -> list[tuple[Layout, int]]:
            return [(replace(x, accumulation=min(n, count)), place) for n in numbers]

        if ranks == 1:
            return of(2), 0  # a third is as the second
        if x.pipeline_schedule == "gpipe":
            return (of(2, 3), count - 2) if count > WHOLE else (of(count), 0)
        if x.pipeline_schedule != "1f1b":  # what is sent is kept to the end
            some = count > 3 * ranks
            return (of(2 * ranks, 3 * ranks), count / ranks - 2) if some else (of(count), 0)
        if ranks <= 4:
            return of(ranks + 1), 0
        if place == ranks - 1:
            return [(replace(x, pipeline=2, accumulation=3), 1)], 0
        at = min(place, 1)  # all in the middle are alike, but for how many micro batches wait
        shorter = [(replace(x, pipeline=n + at, accumulation=n + at + 1), at) for n in (2, 3)]
        return shorter, ranks - place - 2

    def _deep(self, layout: Layout, place: int) -> Profile:
        """With as many layers as the rank has, which are traced as fewer."""
        parts = _Parts(self.job.shape, self.layout)
        wanted = parts.own(parts.depth, self.place)
        depths, times = _Parts(self.job.shape, layout).depths(place, wanted)
        found = [self._run(with_depth(self.job.shape, n), layout, place) for n in depths]
        return found[0] if len(found) == 1 else extended(found[0], found[1], times)

    def _run(self, shape: PretrainedConfig, layout: Layout, place: int) -> Profile:
        size = layout.micro_batch * layout.accumulation * layout.data
        train = self.job.config.train.model_copy(update={"global_batch_size": size})
        config = self.job.config.model_copy(update={"train": train})
        rank = place * (layout.world_size // layout.pipeline)
        with fake_rank(config, layout, shape, rank) as (engine, watch):
            marks, batch = Marks(engine, watch), _batch(layout, self.job.length)
            _step(engine, batch, marks)
            begun, before = len(watch.changes), _held(engine, watch)
            summed = _step(engine, batch, marks)
            kind_of = before | summed | _held(engine, watch)
            return profile(marks, begun, kind_of, all_live=self.gpu)


def _away(layout: Layout) -> Iterator[str]:
    """Kinds that are not on the device: a CPU's memory is both."""
    if layout.offload_parameters != "none":
        yield from ("parameters", "gradients")
    if layout.offload_optimizer != "none" or layout.offload_parameters != "none":
        yield "optimizer"


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


def _step(engine: Engine, batch: Batch, marks: Marks) -> dict[int, str]:
    """The kinds of the blocks of all gradients."""
    engine.forward_backward(batch)
    marks.watch.sent.clear()
    summed = _held(engine, marks.watch)
    marks.note("norm")
    engine.gradient_norm()
    marks.note("update")
    engine.step(True)
    return summed


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
