"""Memory by trace: the engine that would train, run for a step on fake tensors.

A step is whole, as training takes it: micro batches by the real schedule, the norm of the
gradients, the optimizer. Every block of memory is followed. Of a deep model two small depths are
traced, of a pipeline a shorter one, and of many micro batches a few: see `rostra.plan.places`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import torch
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from rostra.adapt.quantized import QuantizedLinear
from rostra.batch import Batch
from rostra.dry_run import Watch, fake_group, fake_rank
from rostra.hardware.cluster import Cluster
from rostra.layout import Layout
from rostra.parallel import Engine
from rostra.parallel.pipeline import actions
from rostra.parallel.pipeline_split import balance
from rostra.plan.job import Job
from rostra.plan.memory import MemoryModel
from rostra.plan.places import Bytes, Marks, Span, extended, peak, replayed, spans
from rostra.plan.results import Memory
from rostra.plan.scaled import moves

WHOLE = 8  # layers of a stage up to which all are traced
FEWEST = 2  # of those that tell of more
INPUTS = 3 * 8  # bytes of a position: its token, its label, where it is in its document


def traced(job: Job, layout: Layout, cluster: Cluster) -> Memory:
    """Memory over a step of the rank that needs most, and its source `trace`.

    Nothing is told of the host, of loading and of saving, nor of what a device keeps beside
    tensors. fp8 is taken as bf16. Of a layout of which a trace does not see all (`_unseen`) the
    answer is that of the closed formulas, with their source.

    Raises RequestError for what cannot be trained, as `rostra.dry_run` does.
    """
    gpu = cluster.device.kind == "gpu"
    if _unseen(layout, job.sizes.parameters, gpu):
        return MemoryModel(job, cluster)(layout)
    job = replace(job, shape=_in_kernel(job.shape)) if gpu else job
    places = _Parts(job, layout).places()
    found = [_Trace(job, layout, place, gpu).peak() for place in places]
    kinds = max(found, key=lambda kinds: sum(kinds.values()))
    return Memory(kinds, source="trace")


def _unseen(layout: Layout, parameters: int, gpu: bool) -> bool:
    """What a compiler keeps no trace sees, nor when a GPU fetches activations from the host, nor
    what DeepSpeed moves."""
    fetched = gpu and layout.activation_checkpointing == "offload"
    return layout.compile or fetched or moves(layout, parameters, gpu)


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

    job: Job
    layout: Layout

    @property
    def depth(self) -> int:
        return self.job.sizes.depth

    @cached_property
    def period(self) -> int:
        """After so many layers all is as before."""
        kinds = getattr(self.job.shape.get_text_config(), "layer_types", None) or [""] * self.depth
        same = (n for n in range(1, self.depth) if kinds[n:] == kinds[:-n])
        kind, _, every = self.layout.activation_checkpointing.partition(":")
        return next(same, self.depth) * (int(every) if kind == "every" else 1)

    def own(self, depth: int, place: int) -> list[int]:
        """Layers in each stage of the rank at `place` in the pipeline, of `depth` in all."""
        ranks, stages = self.layout.pipeline, self.layout.stages
        if ranks == 1:
            return [depth]
        *layers, last = self.job.sizes.costs
        deep = [*layers, *layers[:1] * (depth - self.depth)]
        cuts = balance([*deep[: depth - 1], last], ranks * stages)
        return [cuts[n * ranks + place + 1] - cuts[n * ranks + place] for n in range(stages)]

    def places(self) -> Iterator[int]:
        """Those in the pipeline that may need most: of equal stages the first, which waits
        longest for its backward passes, or under zero bubble the last, where most wait for their
        second part. One between the ends waits for a micro batch less than the first, of which
        every layer keeps its input, but receives each from both sides."""
        known, first = set(), self.own(self.depth, 0)
        halves = self.layout.splits_backward
        for place in sorted(range(self.layout.pipeline), reverse=halves):
            own, last = self.own(self.depth, place), place == self.layout.pipeline - 1
            fewer = all(a <= b for a, b in zip(own, first, strict=True))
            buffers = self.layout.accumulation * self.layout.tensor
            less = place and not last and fewer and buffers <= sum(own) and not halves
            kind = (tuple(own), place == 0, last)
            if kind not in known and not less:
                yield place
            known.add(kind)

    def depths(self, place: int, wanted: list[int]) -> tuple[list[int], list[float]]:
        """One or two depths that tell of a rank at `place` with `wanted` layers in its stages;
        of two, how often the growth from the first to the second is added to the first, for
        each stage and for all together."""
        known = self._small(place, wanted)
        if max(wanted) <= WHOLE:
            for depth, own in known:
                if own == wanted:
                    return [depth], []
        for (one, small), (two, large) in combinations(known, 2):
            grown = [b - a for a, b in zip(small, large, strict=True)]
            missing = [w - a for a, w in zip(small, wanted, strict=True)]
            if all(map(self._tells, small, large, wanted)):
                times = [m / g if m else 0.0 for m, g in zip(missing, grown, strict=True)]
                return [one, two], [*times, sum(missing) / sum(grown)]
        return [next(depth for depth, own in reversed(known) if sum(own) <= sum(wanted))], []

    def _small(self, place: int, wanted: list[int]) -> list[tuple[int, list[int]]]:
        """Depths up to one that gives a rank as many layers as `wanted`, with what it gets."""
        found = []
        most = self.depth + (2 * WHOLE if self.period == 1 else 0)
        for depth in range(self.layout.pipeline * self.layout.stages, most + 1):
            found.append((depth, self.own(depth, place)))
            if min(found[-1][1]) > min(max(wanted), WHOLE + 2 * self.period):
                break
        return found

    def _tells(self, small: int, large: int, wanted: int) -> bool:
        """Whether stages of two sizes tell of a third."""
        alike = (wanted - small) % self.period == 0 and (large - small) % self.period == 0
        return small == wanted or (FEWEST <= small < min(large, wanted) and alike)


@dataclass(frozen=True)
class _Trace:
    """Of the first of the ranks that stand at `place` in the pipeline."""

    job: Job
    layout: Layout
    place: int
    gpu: bool

    def peak(self) -> Bytes:
        """With all micro batches of the layout, which are traced as fewer."""
        x, few, place = self.layout, *self.smaller()
        seen = self._deep(few, place)
        if x.pipeline > 1:
            line = replace(x, replicate=1, shard=1, context=1, tensor=1)
            with fake_group(self.place, line):
                seen = replayed(seen, actions(line, self.place))
        found = peak(seen)
        # what is cut into micro batches: on a GPU it is brought there, in a pipeline put together
        more = x.accumulation - few.accumulation
        rows = (more if x.pipeline > 1 else 0) + self.gpu * x.accumulation
        found["activations"] += INPUTS * rows * x.micro_batch * self.job.length
        if self.gpu and x.pipeline > 1:  # there is a buffer for what each of them receives
            found["communication"] += more * seen[0].before["communication"] // few.accumulation
        return found | (dict.fromkeys(_away(x), 0) if self.gpu else {})

    def smaller(self) -> tuple[Layout, int]:
        """A layout that has all kinds of actions of the rank, one after each other that it may
        come after, and the place in its pipeline."""
        x, ranks = self.layout, self.layout.pipeline
        if ranks == 1:
            return replace(x, accumulation=min(x.accumulation, 2)), 0  # a third is as the second
        few = min(ranks, 4 if self.place else 3)
        place = self.place if few == ranks else min(self.place, 1)
        if self.place == ranks - 1:
            few, place = 2, 1
        return replace(x, pipeline=few, accumulation=min(x.accumulation, few + 1)), place

    def _deep(self, layout: Layout, place: int) -> list[Span]:
        """With as many layers as the rank has, which are traced as fewer."""
        parts = _Parts(self.job, self.layout)
        wanted = parts.own(parts.depth, self.place)
        depths, times = _Parts(self.job, layout).depths(place, wanted)
        found = [self._run(with_depth(self.job.shape, n), layout, place) for n in depths]
        return found[0] if len(found) == 1 else extended(found[0], found[1], times)

    def _run(self, shape: PretrainedConfig, layout: Layout, place: int) -> list[Span]:
        size = layout.micro_batch * layout.accumulation * layout.data
        train = self.job.config.train.model_copy(update={"global_batch_size": size})
        config = self.job.config.model_copy(update={"train": train})
        rank = place * (layout.world_size // layout.pipeline)
        with fake_rank(config, layout, shape, rank) as (engine, watch):
            batch = _batch(layout, self.job.length)
            # a step of these leaves what the next one replaces
            again = layout.engine == "deepspeed" or layout.splits_backward
            if again:
                _step(engine, batch, Marks(engine, watch))
            marks = Marks(engine, watch)
            kind_of = _step(engine, batch, marks) | _held(engine, watch)
            given = watch.blocks(batch.tensors().values())
            return spans(marks, {**kind_of, **dict.fromkeys(given, "")}, self.gpu, again)


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
    marks.does("begin")
    engine.forward_backward(batch)
    marks.watch.sent.clear()
    summed = _held(engine, marks.watch)
    marks.does("norm")
    engine.gradient_norm()
    marks.does("update")
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
