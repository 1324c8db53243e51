"""What DeepSpeed's ZeRO lays on a rank (Rajbhandari et al. 2020, arXiv:1910.02054), with the
buffers of the config that `rostra.config.deepspeed` makes."""

from __future__ import annotations

from dataclasses import replace

from rostra.config.deepspeed import bucket_numbers
from rostra.layout import Layout
from rostra.plan.memory.step import Parts
from rostra.plan.memory.weights import FLOAT, Unit


def held(x: Layout, all_: Unit) -> Unit:
    """Weights in the type that the model has, a float32 copy of a rank's partition whatever
    that type is, and the optimizer's states for it. ZeRO-3 cuts the weights too."""
    if x.sharding == "no_shard":
        return all_
    each = FLOAT if x.compute != "bf16_pure" else 2
    ranks = x.shard * x.context
    weights = all_.whole - (FLOAT - each) * all_.trained
    part = weights / ranks if x.sharding == "full_shard" else weights
    states = (all_.states + FLOAT * all_.trained) / ranks
    return replace(all_, part=part, states_part=states, trained_part=all_.trained / ranks)


def parts(x: Layout, all_: Unit, layer: Unit, embedding: Unit) -> Parts:
    """Gradients: whole under stages 0 and 1, a rank's partition under 2 and 3, which a bucket
    fills."""
    each = FLOAT if x.compute != "bf16_pure" else 2
    bucket = each * bucket_numbers(int(all_.whole / FLOAT))
    whole = each * all_.trained
    ranks = x.shard * x.context
    plain = Parts(
        x.accumulation > 1,
        whole if x.accumulation > 1 else 0.0,
        whole,
        each * layer.trained,
        each * embedding.trained,
        buckets=bucket,
        temporary=FLOAT * all_.trained / ranks,
    )
    if x.sharding in ("no_shard", "zero1"):
        return plain
    part = whole / ranks
    cut = replace(plain, collected=True, standing=part, gradients=part)
    if x.sharding == "shard_grad_op":
        return cut
    return replace(cut, around=each * layer.trained)  # a layer's, whole while it computes
