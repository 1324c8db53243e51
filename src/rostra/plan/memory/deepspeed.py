"""What DeepSpeed's ZeRO lays on a rank, on the device, its host and NVMe (Rajbhandari et al.
2020, arXiv:1910.02054; 2021, ZeRO-Infinity, arXiv:2104.07857; Ren et al. 2021, ZeRO-Offload,
arXiv:2101.06840), with the config that `rostra.config.deepspeed` makes.

Sizes and places are those of DeepSpeed 0.19's source; each function names the methods.
"""

from __future__ import annotations

from dataclasses import replace

from rostra.config.deepspeed import bucket_numbers, swapped_numbers
from rostra.layout import Layout
from rostra.plan.memory.step import Parts
from rostra.plan.memory.weights import FLOAT, Unit, pinned

# Numbers, DeepSpeed's defaults: gathered at once (stage3_max_live_parameters); updated at once
# (sub_group_size); of parameters on the host under NVMe (max_in_cpu).
LIVE = SUB_GROUP = MAX_IN_CPU = 10**9
SWAPPED, FETCHED = 4, 5  # buffers of offload_optimizer and offload_param for NVMe


def held(x: Layout, all_: Unit) -> Unit:
    """Weights in the type that the model has, a float32 copy of a rank's partition whatever
    that type is (`_create_fp32_partitions`), and the optimizer's states for it. ZeRO-3 cuts the
    weights too."""
    if x.sharding == "no_shard":
        return all_
    weights = _weights(x, all_)
    part = weights / _ranks(x) if x.sharding == "full_shard" else weights
    states = (all_.states + FLOAT * all_.trained) / _ranks(x)
    return replace(all_, part=part, states_part=states, trained_part=all_.trained / _ranks(x))


def parts(x: Layout, all_: Unit, layer: Unit, embedding: Unit, numbers: int, on_gpu: bool) -> Parts:
    """Of a model of `numbers`. Gradients are whole under stages 0 and 1, a rank's partition
    under 2 and 3, which a bucket fills. On a GPU an offloaded optimizer has them on the host:
    each leaves as its bucket is reduced."""
    each, offloaded = _each(x), x.offload_optimizer != "none"
    bucket = each * bucket_numbers(numbers)
    whole, part = each * all_.trained, each * all_.trained / _ranks(x)
    reduced = bucket if numbers > bucket_numbers(numbers) else 0.0  # a copy of a full bucket
    plain = Parts(
        x.accumulation > 1,
        whole if x.accumulation > 1 else 0.0,
        whole,
        each * layer.trained,
        each * embedding.trained,
        buckets=reduced,
        temporary=0.0 if offloaded else FLOAT * all_.trained / _ranks(x),
        resident=_beside_offload(x, all_, on_gpu) if offloaded else 0.0,
    )
    if x.sharding == "no_shard":
        return replace(plain, buckets=bucket)
    if x.sharding == "zero1":
        if x.accumulation > 1:  # the bucket stays to the last micro batch
            return replace(plain, resident=plain.resident + bucket)
        return replace(plain, backward=bucket)
    if x.sharding == "full_shard":
        return _cut(x, all_, plain, numbers, on_gpu)
    kept = 0.0 if offloaded else part
    return replace(
        plain,
        collected=True,
        standing=kept if x.accumulation > 1 else 0.0,
        gradients=kept,
        embedding=max(plain.embedding, bucket),
        backward=bucket,
    )


def _beside_offload(x: Layout, all_: Unit, on_gpu: bool) -> float:
    """ZeRO-1 and 2 carry gradients through a buffer for the largest (`temp_grad_buffer_for_gpu_
    offload`). A CPU is its own host, and has that's side too: see `beside`."""
    largest = _each(x) * all_.largest
    if on_gpu:
        return largest
    copies = _each(x) * (2 if x.accumulation > 1 else 1) + FLOAT
    return 2 * largest + copies * all_.trained / _ranks(x)


def _cut(x: Layout, all_: Unit, plain: Parts, numbers: int, on_gpu: bool) -> Parts:
    """ZeRO-3. Parameters are fetched ahead until LIVE numbers are here, and stay while they are
    used again within as many (`PartitionedParameterCoordinator.fetch_sub_module`,
    `__params_to_release`); of a larger model more are always on their way, in a flat tensor
    beside those that come out of it (`AllGatherCoalescedHandle.wait`).

    A bucket for gradients is there from the beginning; they are copied once more to be reduced
    (`reduce_scatter_coalesced`), one that is larger than it lies outside. A rank's partition of
    them is one tensor (`grad_partitions_flat_buffer`), copied for the update a sub-group at a
    time (`_prepare_fp32_grad_for_sub_group`); an offloaded optimizer has a second one instead,
    on the host as the first.
    """
    each, offloaded = _each(x), x.offload_optimizer != "none"
    number = _weights(x, all_) / numbers  # bytes of one
    bucket = bucket_numbers(numbers)
    gathered = number * (min(numbers, LIVE) + (bucket if numbers > LIVE else 0))
    trained = all_.trained / _ranks(x)
    gradients = trained * (each + (FLOAT if offloaded else 0))
    if on_gpu and offloaded:
        gradients = 0.0
    copied = each + FLOAT if each != FLOAT else FLOAT
    return replace(
        plain,
        collected=True,
        standing=gradients,
        gradients=gradients,
        around=gathered,
        # where one bucket takes all gradients, at the end alone
        buckets=each * max(bucket, all_.largest) if numbers > bucket else 0.0,
        embedding=max(plain.embedding, each * bucket if numbers <= bucket else 0.0),
        temporary=0.0 if offloaded else copied * min(trained, SUB_GROUP),
        resident=each * bucket,
    )


def beside(x: Layout, all_: Unit, numbers: int) -> tuple[float, float]:
    """Bytes of a rank on the host of a GPU, and on NVMe; `all_` as `held` gives it.

    The optimizer's masters and states are there, or on NVMe with the gradients, through four
    pinned buffers of a sub-group (`OptimizerSwapper`). Gradients are pinned on the host, in
    ZeRO-3 twice: as they are reduced (`grad_partitions_flat_buffer`) and for the update
    (`initialize_optimizer_states`); in ZeRO-1 and 2 there is a copy of the weights' part to
    carry them back (`param_buffer_of_bit16_for_cpu_offload_groups`), and with accumulation one
    of the gradients (`async_accumulate_grad_in_cpu_via_gpu`).
    """
    each, trained = _each(x), all_.trained_part
    host = nvme = 0.0
    group = min(trained, SUB_GROUP)
    if x.offload_optimizer == "cpu":
        host += all_.states_part + pinned(each * trained)
        host += trained / max(group, 1) * pinned(FLOAT * group)
        if x.sharding != "full_shard":
            host += pinned(each * all_.largest) + each * trained * (x.accumulation > 1)
    elif x.offload_optimizer == "nvme":
        host += pinned(each * trained) + SWAPPED * FLOAT * group
        nvme += all_.states_part + FLOAT * trained
    if x.offload_parameters == "cpu":
        host += pinned(all_.part)
    elif x.offload_parameters == "nvme":
        kept, size = min(all_.part / each, MAX_IN_CPU), all_.part / each
        host += each * (kept + FETCHED * swapped_numbers(int(all_.largest), _ranks(x)))
        if size > kept:  # space for a sub-group on its way back, taken for all ranks
            host += each * group * _ranks(x)  # (reserve_partitioned_swap_space)
        nvme += all_.part - each * kept
    return host, nvme


def _each(x: Layout) -> int:
    return FLOAT if x.compute != "bf16_pure" else 2


def _ranks(x: Layout) -> int:
    return x.shard * x.context


def _weights(x: Layout, all_: Unit) -> float:
    return all_.whole - (FLOAT - _each(x)) * all_.trained
