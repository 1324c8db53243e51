"""Memory of any layout by closed formulas: what lies on a rank from step to step, and what lives
beside it at the peak of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, TypeVar

from rostra.build.stages import loss_chunk
from rostra.hardware.cluster import Cluster
from rostra.layout import SHARDED, Layout
from rostra.parallel.pipeline_split import balance
from rostra.plan.job import Job, Layer
from rostra.plan.memory.layers import Kernel, Setting, norm_profile, program
from rostra.plan.memory.pipeline import in_flight
from rostra.plan.memory.step import Layers, Loss, Moment, Parts, Place, Stage, moments
from rostra.plan.memory.tape import Profile
from rostra.plan.memory.weights import FLOAT, HALF, Matrix, Unit, Weights, under_way, unit_of
from rostra.plan.results import Memory

T = TypeVar("T")
REDUCED = {"fp32": 4, "bf16": 2}
_LOGITS = 17  # bytes a logit of a chunk, at the most: logits, probabilities, two of gradients, mask


class MemoryModel:
    """Memory of a job's layouts on a cluster. Terms are kept by what they depend on."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self.device = cluster.device.kind
        self._known: dict[Hashable, Any] = {}
        self._layers = _in_order(job)

    def __call__(self, layout: Layout) -> Memory:
        """Memory of the rank that needs most."""
        best: tuple[float, Moment, Unit] | None = None
        for stage, held in self._stages(layout):
            moment = max(moments(stage), key=lambda m: m.total)
            total = moment.total + held.part + held.states_part
            if best is None or total > best[0]:
                best = (total, moment, held)
        assert best is not None
        _, moment, held = best
        kinds = {
            "parameters": int(held.part - held.scales_part),
            "quantization": int(held.scales_part),
            "gradients": int(moment.gradients),
            "optimizer": int(held.states_part),
            "activations": int(moment.activations + moment.temporary),
            "logits": int(moment.logits),
            "gathered": int(moment.gathered),
            "communication": int(moment.communication),
            "reserved": 0,
        }
        return Memory(kinds)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = make()
        return found

    # stages

    def _stages(self, x: Layout) -> Iterator[tuple[Stage, Unit]]:
        """The ranks of the pipeline that may need most, with what lies there."""
        for rank in self._ranks(x):
            split = self._split(x, rank)
            held, parts = self._once(
                ("parts", rank, *_of_weights(x)), partial(self._parts, x, rank, split)
            )
            layers, loss, batch = self._once(
                ("activations", rank, *_of_activations(x)),
                partial(self._activations, x, rank, split),
            )
            buffers = 0.0
            if x.pipeline > 1:
                ways = (rank > 0 or x.stages > 1) + (rank < x.pipeline - 1 or x.stages > 1)
                buffers = ways * x.accumulation * layers.input * x.stages
            stage = Stage(layers, loss, parts, in_flight(x, rank), rank == 0, buffers, batch)
            yield stage, held

    def _ranks(self, x: Layout) -> tuple[int, ...]:
        if x.pipeline == 1:
            return (0,)
        return tuple(sorted({0, 1, x.pipeline - 1}))

    def _split(self, x: Layout, rank: int) -> tuple[int, ...]:
        """Which layers a rank of the pipeline has."""
        count = x.pipeline * x.stages
        if count == 1:
            return tuple(range(len(self._layers)))
        cuts = self._once(("cuts", count), lambda: balance(self._costs(), count))
        places = range(rank, count, x.pipeline)
        return tuple(i for place in places for i in range(cuts[place], cuts[place + 1]))

    def _costs(self) -> list[float]:
        costs = [6.0 * layer.numbers for layer in self._layers]
        costs[-1] += 6.0 * self.job.sizes.embedding
        return costs

    # what lasts

    def _parts(self, x: Layout, rank: int, split: tuple[int, ...]) -> tuple[Unit, Parts]:
        sharded = x.sharding in SHARDED and x.world_size > 1
        weights = Weights(self.job, x.quantization, x.adapter, HALF.get(x.compute, FLOAT))
        shards = x.shard * x.context if sharded else 1
        half = HALF.get(x.compute) if sharded else None
        section = self.job.config.optimizer

        def unit(matrices: Any, inside: bool = False) -> Unit:
            as_ = half if inside else None
            return unit_of(matrices, x.tensor, shards, as_, section, x.optimizer_states)

        kinds = Counter(self._layers[i] for i in split)
        per_layer = {layer: unit(weights.layer(layer), inside=True) for layer in kinds}
        inside = sum((per_layer[k].times(n) for k, n in kinds.items()), Unit())
        first, last = rank == 0, rank == x.pipeline - 1
        tied = self.job.sizes.tied
        embedding = unit(weights.embedding()) if first else Unit()
        head = unit(weights.head()) if last and not (tied and first) else Unit()
        after = unit(weights.after()) if last else Unit()
        apart = sharded and weights.frozen and not tied and not embedding.trained
        around = (Unit() if apart else embedding) + head + after
        everything = inside + embedding + head + after
        layer = max(per_layer.values(), key=lambda u: u.gathered, default=Unit())
        matrices = [m for i in split for m in weights.layer(self._layers[i])]
        matrices = [*weights.embedding()] * first + matrices
        matrices += [*weights.after(), *([] if tied and first else weights.head())] * last
        laid = self._laid(x, everything, layer, around, embedding, matrices)
        return self._held(x, everything), laid

    def _held(self, x: Layout, all_: Unit) -> Unit:
        """Bytes of this rank between steps: of optimizer states, what ZeRO-1 leaves it."""
        from dataclasses import replace

        pure = x.compute == "bf16_pure"
        masters = FLOAT * all_.trained if pure else 0.0
        states, parts = all_.states_part, 1
        if x.sharding == "zero1":
            parts = x.shard * x.context
        part = all_.part - (all_.trained * (FLOAT - 2) if pure else 0.0)
        return replace(all_, part=part, states_part=(states + masters) / parts)

    def _laid(
        self,
        x: Layout,
        all_: Unit,
        layer: Unit,
        around: Unit,
        embedding: Unit,
        matrices: list[Matrix],
    ) -> Parts:
        sharded = x.sharding in SHARDED and x.world_size > 1
        gradients = FLOAT * all_.trained_part
        temporary = self._update(x, all_)
        if not sharded:
            grid = x.world_size > 1
            pure = x.compute == "bf16_pure"
            collected = grid or x.accumulation > 1 or x.optimizer_in_backward or pure
            standing = gradients if grid or x.accumulation > 1 else 0.0
            if x.optimizer_in_backward:
                gradients = 0.0
            buckets = 0.0
            if grid and (x.reduction != "fp32" or x.sharding == "zero1"):
                buckets = REDUCED[x.reduction] * under_way(matrices, x.tensor)
            return Parts(
                collected,
                standing,
                gradients,
                FLOAT * layer.trained_part,
                FLOAT * (embedding.trained if embedding else 0.0),
                self.job.sizes.tied,
                buckets=buckets,
                temporary=temporary,
            )
        reduced = REDUCED[x.reduction]
        standing = gradients if x.accumulation > 1 else 0.0
        return Parts(
            False,
            standing,
            gradients,
            0.0 if standing else FLOAT * layer.trained_part,
            FLOAT * embedding.trained,
            self.job.sizes.tied,
            layer=layer.gathered,
            around=around.gathered,
            again=x.sharding != "shard_grad_op",
            reduced_layer=reduced * layer.trained_gathered,
            reduced_around=reduced * around.trained_gathered,
            reduced_part=reduced * layer.trained_part if standing else 0.0,
            around_gradients=FLOAT * around.trained,
            around_part=FLOAT * around.trained_part,
            temporary=temporary,
        )

    def _update(self, x: Layout, all_: Unit) -> float:
        """Temporary results of the optimizer's step: torch's fused AdamW has none; Lion makes
        its update for all parameters at once."""
        name = self.job.config.optimizer.name
        if name == "lion":
            return FLOAT * all_.trained_part
        if x.optimizer_states != "fp32":
            return 6.0 * FLOAT * all_.largest
        return 0.0

    # activations

    def _activations(
        self, x: Layout, rank: int, split: tuple[int, ...]
    ) -> tuple[Layers, Loss | None, float]:
        weights = Weights(self.job, x.quantization, x.adapter, HALF.get(x.compute, FLOAT))
        places: list[Place] = []
        kept = casts = 0.0
        profiles = [self._profile(x, weights, i, split) for i in split]
        for at, profile in enumerate(profiles):
            behind = len(split) - 1 - at
            first, last = at == 0, behind == 0
            edge = min(at, behind) < 2  # the next to an end has neighbours on both sides
            if edge or profile != profiles[at - 1] or profile != profiles[at + 1]:
                at_layer = (kept, casts, profile.forward, profile.backward, profile.left)
                places.append(Place(*at_layer, behind, first, last))
            kept += profile.kept
            casts += profile.casts
        setting = self._setting(x, weights, self._layers[0])
        size = setting.tokens / setting.tensor * self.job.sizes.hidden * setting.stream
        whole = size * setting.tensor if setting.tensor > 1 else 0.0
        layers = Layers(kept, casts, size, whole, tuple(places), len(split))
        loss = self._loss(x, weights, setting) if rank == x.pipeline - 1 else None
        return layers, loss, self._batch(x, setting)

    def _profile(self, x: Layout, weights: Weights, index: int, split: tuple[int, ...]) -> Profile:
        layer = self._layers[index]
        mode, _, every = x.activation_checkpointing.partition(":")
        again = mode != "every" or index % int(every) == 0
        first = index == 0 and weights.frozen
        collected = self._collects(x)
        key = ("profile", layer, again, first, collected, *_of_activations(x))
        return self._once(key, lambda: self._played(x, weights, layer, again, first, collected))

    def _collects(self, x: Layout) -> bool:
        if x.sharding in SHARDED and x.world_size > 1:
            return x.pipeline > 1
        return (
            x.world_size > 1
            or x.accumulation > 1
            or x.optimizer_in_backward
            or x.compute == "bf16_pure"
        )

    def _played(
        self, x: Layout, weights: Weights, layer: Layer, again: bool, first: bool, collected: bool
    ) -> Profile:
        made = program(self.job.sizes, layer, self._setting(x, weights, layer), first)
        mode = x.activation_checkpointing if again else "none"
        if x.compile:
            made.tape.fuse()
            mode = "selective:operations" if mode in ("none", "offload") else mode
        every = range(len(made.tape.steps))
        stretches = {
            "full": [every], "selective:attention": [made.attention],
            "selective:mlp": [made.mlp], "selective:operations": [every],
        }  # fmt: skip
        chosen = [every] if mode.startswith("every") else stretches.get(mode, [])
        dear = mode == "selective:operations"
        return made.tape.profile(
            made.start, chosen, dear=dear, least=x.compile, collected=collected
        )

    def _setting(self, x: Layout, weights: Weights, layer: Layer) -> Setting:
        half = HALF.get(x.compute, FLOAT)
        sharded = x.sharding in SHARDED and x.world_size > 1
        pure = x.compute == "bf16_pure"
        quantized = frozenset(n for linear in layer.linears for n in weights.quantized(linear))
        return Setting(
            samples=x.micro_batch,
            positions=self.job.length // x.context,
            length=self.job.length,
            tensor=x.tensor,
            stream=2 if pure else FLOAT,
            product=half,
            weight=2 if pure or (sharded and half == 2) else FLOAT,
            copies=half == 2 and not sharded and not pure and not weights.frozen,
            trains=not weights.frozen,
            quantized=quantized,
            adapted=weights.adapted(layer),
            kernel=self._kernel(x, layer),
            wide_powers=self.device == "gpu",
        )

    def _kernel(self, x: Layout, layer: Layer) -> Kernel:
        if x.context > 1 and x.context_method == "ring":
            return "ring"
        if self.job.config.model.attention == "eager":
            return "eager"
        masked = self.job.config.data.isolate_documents
        windowed = layer.window is not None and layer.window < self.job.length
        return "masked" if masked or windowed else "flash"

    def _batch(self, x: Layout, setting: Setting) -> float:
        """Tokens, labels and positions of the step; rotations; masks, for each kind of layer."""
        rows = x.micro_batch * x.accumulation
        tokens = 3.0 * 8 * rows * self.job.length
        rotations = 2.0 * setting.stream * setting.positions * self.job.sizes.head_size
        rotations *= setting.samples if self.job.config.data.isolate_documents else 1
        kinds = {layer for layer in self._layers if self._kernel(x, layer) == "masked"}
        mask = setting.samples * setting.length**2 * len({k.window for k in kinds})
        return tokens + rotations + mask

    def _loss(self, x: Layout, weights: Weights, setting: Setting) -> Loss:
        """Norm, head and loss, chunk by chunk (Hsu et al. 2024, arXiv:2410.10989)."""
        s, each = self.job.sizes, setting.product
        hidden = setting.tokens * s.hidden
        vocabulary = s.vocabulary / x.tensor
        rows = min(setting.tokens, self.job.config.train.loss_chunk or loss_chunk(s.vocabulary))
        matrix = vocabulary * s.hidden
        trains = weights.head_trains
        lies = FLOAT if trains and setting.stream == FLOAT else each
        norm = norm_profile(s, setting)
        part = rows * s.hidden * (each if each != setting.stream else 0)
        before = rows * vocabulary * each if setting.tokens > rows else 0.0  # of the last chunk
        return Loss(
            kept=norm.kept - setting.tokens / setting.tensor * s.hidden * setting.stream,
            output=hidden * setting.stream,
            logits=rows * vocabulary * _LOGITS + part + before,
            gradients=hidden * setting.stream + (matrix * FLOAT if trains else 0.0),
            copies=matrix * each if lies != each else 0.0,
            product=rows * vocabulary * each + part + (matrix * each if trains else 0.0),
            head=matrix * FLOAT if trains else 0.0,
            norm=norm.backward,
        )


def _in_order(job: Job) -> tuple[Layer, ...]:
    """The layers of a model, those of several kinds spread evenly."""
    placed = [((i + 0.5) / count, layer) for layer, count in job.sizes.layers for i in range(count)]
    return tuple(layer for _, layer in sorted(placed, key=lambda x: x[0]))


def _of_weights(x: Layout) -> tuple[Hashable, ...]:
    """What decides where parameters, gradients and states lie."""
    return (
        x.pipeline, x.stages, x.tensor, x.context, x.shard, x.sharding, x.replicate > 1, x.compute,
        x.reduction, x.quantization, x.adapter, x.optimizer_states, x.optimizer_in_backward,
        x.accumulation > 1, x.engine, x.offload_parameters, x.offload_optimizer,
    )  # fmt: skip


def _of_activations(x: Layout) -> tuple[Hashable, ...]:
    """And what decides what a micro batch keeps."""
    return (
        x.pipeline, x.stages, x.micro_batch, x.accumulation, x.tensor, x.context,
        x.context_method, x.activation_checkpointing, x.compute, x.quantization, x.adapter,
        x.sharding, x.world_size > 1, x.compile, x.optimizer_in_backward, x.engine,
    )  # fmt: skip
