"""What lies on a rank of a pipeline from step to step under a layout, and how its parameters and
gradients move in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from rostra.layout import SHARDED, Layout
from rostra.plan.conventions import Conventions
from rostra.plan.job import Job, Layer
from rostra.plan.memory import deepspeed
from rostra.plan.memory.step import Parts
from rostra.plan.memory.weights import FLOAT, HALF, Matrix, Unit, Weights, under_way, unit_of

REDUCED = {"fp32": 4, "bf16": 2}
# Bytes a number of torchao's uncompiled step at its most, as measured: tensors of 4 bytes, with
# codes of 8.
LOW_BIT_FLOAT, LOW_BIT_TABLE = 25, 53


def is_sharded(x: Layout) -> bool:
    """Whether the torch engine shards parameters (DeepSpeed has its own ways)."""
    return x.sharding in SHARDED and x.world_size > 1 and x.engine == "torch"


def recasts(x: Layout) -> bool:
    """Whether weights are cast at each use (`rostra.parallel.recast`). What offloads activations
    keeps the casts."""
    cut = x.engine == "deepspeed" and x.sharding == "full_shard"
    return cut and x.activation_checkpointing != "offload"


def is_collected(x: Layout) -> bool:
    """Whether gradients leave a parameter as soon as they are there: for a bucket, a master
    weight or what micro batches before have left, or because the optimizer takes them."""
    if is_sharded(x):
        return x.pipeline > 1
    if x.engine == "deepspeed":
        return x.sharding in ("shard_grad_op", "full_shard") or x.accumulation > 1
    more = x.world_size > 1 or x.accumulation > 1
    return more or x.optimizer_in_backward or x.compute == "bf16_pure"


_fields = attrgetter(
    "pipeline", "stages", "tensor", "sharding", "compute", "reduction", "quantization", "adapter",
    "optimizer_states", "optimizer_in_backward", "engine", "compile", "offload_parameters",
    "offload_optimizer",
)  # fmt: skip


def of_lasting(x: Layout) -> tuple[Hashable, ...]:
    """What of a layout `lasting` depends on."""
    several = x.world_size > 1, x.accumulation > 1
    return (*_fields(x), x.shard * x.context, *several, x.splits_backward)


@dataclass(frozen=True)
class Units:
    """The matrices of a rank, whatever trains them."""

    everything: Unit
    layer: Unit  # the largest
    around: Unit  # what is gathered beside it
    embedding: Unit
    under_way: float = 0.0  # numbers of two buckets, where every rank has all gradients
    split: float = 0.0  # numbers that train, of layers whose backward pass may have two parts


_unit_fields = attrgetter(
    "pipeline", "stages", "tensor", "compute", "quantization", "adapter", "optimizer_states"
)


def of_units(x: Layout) -> tuple[Hashable, ...]:
    """What of a layout `units` depends on."""
    return (*_unit_fields(x), x.shard * x.context if is_sharded(x) else 0)


def units(
    job: Job, x: Layout, own: Sequence[Layer], ends: tuple[bool, bool], way: Conventions
) -> Units:
    """Of a rank with the layers `own`, and of embedding and head what the first and the last of
    the pipeline have; whether it is these are its `ends`."""
    first, last = ends
    sharded, tied = is_sharded(x), job.sizes.tied
    weights = Weights(job, x.quantization, x.adapter, HALF.get(x.compute, FLOAT))
    shards = x.shard * x.context if sharded else 1
    half = HALF.get(x.compute) if sharded else None

    def unit(matrices: Sequence[Matrix], gathered_as: int | None) -> Unit:
        optimizer = job.config.optimizer
        return unit_of(matrices, x.tensor, shards, gathered_as, optimizer, x.optimizer_states)

    inner = 1 if way.half_gathers and x.compute == "fp8" else half
    outer = half if way.half_around else None
    kinds = Counter(own)
    per_layer = {layer: unit(weights.layer(layer), inner) for layer in kinds}
    inside = sum((per_layer[k].times(n) for k, n in kinds.items()), Unit())
    embedding = unit(weights.embedding(), outer) if first else Unit()
    has_head = last and not (tied and first)
    head = unit(weights.head(), outer) if has_head else Unit()
    after = unit(weights.after(), outer) if last else Unit()
    everything = inside + embedding + head + after
    # a frozen embedding is given back before a head is gathered
    apart = sharded and weights.frozen and not tied and not embedding.trained
    around = (Unit() if apart else embedding) + head + after
    layer = max(per_layer.values(), key=lambda u: u.gathered, default=Unit())
    if sharded:
        return Units(everything, layer, around, embedding)
    matrices = [*weights.embedding()] * first
    matrices += [m for layer_ in own for m in weights.layer(layer_)]
    matrices += [*weights.after(), *(weights.head() if has_head else [])] * last
    # the model's first stage goes back in one
    split = inside.trained_part * (1 - 1 / x.stages if first else 1)
    return Units(everything, layer, around, embedding, under_way(matrices, x.tensor), split)


def lasting(job: Job, x: Layout, of: Units, way: Conventions, on_gpu: bool) -> tuple[Unit, Parts]:
    """What lies on a rank that has the matrices `of`, and how it moves."""
    tied = job.sizes.tied
    if x.engine == "deepspeed":
        made = deepspeed.parts(
            x, of.everything, of.layer, of.embedding, job.sizes.parameters, on_gpu
        )
        return deepspeed.held(x, of.everything), replace(made, tied=tied)
    parts = _sharded(x, of, way, on_gpu) if is_sharded(x) else _whole(x, of)
    update = update_bytes(job.config.optimizer.name, x, of.everything, on_gpu)
    return held(x, of.everything), replace(parts, temporary=update, tied=tied)


def held(x: Layout, all_: Unit) -> Unit:
    """With what ZeRO-1 leaves this rank of the optimizer's states (Rajbhandari et al. 2020,
    arXiv:1910.02054, section 5.1), and with the float32 masters of 16-bit weights (Micikevicius
    et al. 2018, arXiv:1710.03740)."""
    pure = x.compute == "bf16_pure"
    masters = FLOAT * all_.trained if pure else 0.0
    parts = x.shard * x.context if x.sharding == "zero1" else 1
    part = all_.part - (all_.trained * (FLOAT - 2) if pure else 0.0)
    return replace(all_, part=part, states_part=(all_.states_part + masters) / parts)


def _whole(x: Layout, of: Units) -> Parts:
    """The whole model on every rank: gradients lie in buckets, all through the step; under zero
    bubble those of layers lie beside these too, as its second part runs no hooks of theirs."""
    grid = x.world_size > 1
    gradients = 0.0 if x.optimizer_in_backward else FLOAT * of.everything.trained_part
    if x.splits_backward:
        gradients += FLOAT * of.split
    sent = grid and (x.reduction != "fp32" or x.sharding == "zero1")
    return Parts(
        is_collected(x),
        gradients if grid or x.accumulation > 1 else 0.0,
        gradients,
        FLOAT * of.layer.trained_part,
        FLOAT * of.embedding.trained,
        buckets=REDUCED[x.reduction] * of.under_way if sent else 0.0,
    )


def _sharded(x: Layout, of: Units, way: Conventions, on_gpu: bool) -> Parts:
    """Parts of everything on every rank, and the whole of a layer while it computes (Zhao et al.
    2023, arXiv:2304.11277). In a pipeline gradients stay whole until all micro batches are
    through; under zero bubble layers stay gathered from their forward pass on. Where parameters
    are on the host, FSDP2 sends each layer's gradients there, too, as soon as they are reduced
    (`foreach_reduce`)."""
    all_, layer, around = of.everything, of.layer, of.around
    reduced, staged = REDUCED[x.reduction], x.pipeline > 1
    away = on_gpu and x.offload_parameters != "none"
    gradients = 0.0 if away else FLOAT * all_.trained_part
    standing = gradients if x.accumulation > 1 else 0.0
    if staged:
        standing = reduced * (all_.trained_gathered if x.accumulation > 1 else 0.0)
    each = HALF.get(x.compute, FLOAT) if way.half_around else FLOAT
    return Parts(
        staged,
        standing,
        max(gradients, standing),
        0.0 if standing or away else FLOAT * layer.trained_part,
        each * of.embedding.trained,
        layer=layer.gathered,
        around=around.gathered,
        again=x.sharding != "shard_grad_op"
        and not (staged and (way.holds_layers or x.splits_backward)),
        stays=staged,
        reduced_layer=reduced * layer.trained_gathered,
        reduced_around=reduced * around.trained_gathered,
        reduced_part=reduced * layer.trained_part if standing or away else 0.0,
        around_gradients=0.0 if staged else each * around.trained,
        pool=reduced * layer.trained_part if away else gradients,
        held_last=layer.gathered if way.holds_last and not staged else 0.0,
    )


def update_bytes(optimizer: str, x: Layout, all_: Unit, on_gpu: bool) -> float:
    """Temporary results of the optimizer's step: torch's fused AdamW has none; Lion makes its
    update for all parameters at once; low-bit states are taken apart and put together parameter
    by parameter, which torchao does in float32 and, by a table, with codes of 8 bytes, unless its
    step is compiled; bitsandbytes, whole on a GPU, in registers."""
    if optimizer == "lion":
        return FLOAT * all_.trained_part
    own_kernels = on_gpu and x.optimizer_states in ("int8", "paged_int8") and not is_sharded(x)
    if x.optimizer_states == "fp32" or own_kernels:
        return 0.0
    if x.compile:
        return 3 * FLOAT * all_.largest
    return (LOW_BIT_FLOAT if x.optimizer_states == "fp8" else LOW_BIT_TABLE) * all_.largest
