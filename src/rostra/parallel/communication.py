"""What the ranks of a layout send each other in a step: counted, and as theory has it.

Bytes are those that one rank sends in the algorithms that send least (Patarasu & Yuan 2009,
J. Parallel Distrib. Comput. 69(2); so counts ZeRO, arXiv:1910.02054, section 7). With n ranks:

kind             a rank sends
all-reduce       2 (n-1)/n of the tensor: the next two, one after the other
reduce-scatter   (n-1)/n of the tensor that it brings
all-gather       (n-1) times the part that it brings
all-to-all       (n-1)/n of the tensor that it brings
send             the tensor, to one other rank
scalar           as the kind above; any collective of a single number: targets, loss, norm

An all-reduce of a tensor that n does not divide is counted with the tensor padded to n parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rostra.layout import SHARDED, Layout
from rostra.models import decoder_layers
from rostra.parallel import replicated, sharded
from rostra.parallel.stage import AUTOCAST

# Names of torch's operators: of torch.distributed (c10d) and of its functional collectives, on
# which DTensor and all_to_all_single_autograd stand.
OPERATORS = {
    "all-reduce": ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"),
    "all-gather": (
        "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_",
        "allgather_coalesced_", "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
        "all_gather_into_tensor_out",
    ),
    "reduce-scatter": (
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out",
    ),
    "all-to-all": ("alltoall_", "alltoall_base_", "all_to_all_single"),
    "send": ("send", "isend"),
}  # fmt: skip
KIND = {name: kind for kind, names in OPERATORS.items() for name in names}
# What moves nothing by itself: the other end of a send, waiting, bookkeeping.
SILENT = {"recv_", "recv_any_source_", "irecv", "wait_tensor", "_wrap_tensor_autograd"}
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

Shape = tuple[int, ...]


@dataclass
class Traffic:
    """Collectives of one kind in which a rank took part, and the bytes that it sent."""

    number: int = 0
    bytes: int = 0


class Step(dict[str, Traffic]):
    """The traffic of a block by kind (see the module's table); kinds that did not occur are
    missing. An operator that is in no list here has its own name as its kind."""

    def add(self, kind: str, elements: int, item: int, ranks: int, times: int = 1) -> None:
        """`times` collectives over `ranks`, each brought `elements` of `item` bytes by a rank."""
        scalar = elements == 1 and kind in OPERATORS and kind != "send"
        name = "scalar" if scalar else kind
        found = self.setdefault(name, Traffic())
        found.number += times
        found.bytes += times * item * _sent(kind, elements, ranks)


def _sent(kind: str, elements: int, ranks: int) -> int:
    part = -(-elements // ranks)
    sent = {
        "all-reduce": 2 * (ranks - 1) * part,
        "reduce-scatter": (ranks - 1) * part,
        "all-gather": (ranks - 1) * elements,
        "all-to-all": (ranks - 1) * part,
    }
    return sent.get(kind, elements)


@contextlib.contextmanager
def count_communication() -> Iterator[Step]:
    """Count what this rank sends within the block: one optimizer step, say.

    Sees what goes through torch's dispatcher, on any backend and in the backward pass too: calls
    of torch.distributed, FSDP2's, DTensor's, those of pipeline schedules, the functional
    collectives. (CommDebugMode of torch counts the collectives, but neither bytes nor sends.)
    What passes by torch.distributed is not seen, as DeepSpeed's collectives in shared memory.
    Groups of one rank send nothing. The first step of a layout may set up connections: count a
    later one.
    """
    step = Step()
    with _Count(step):
        yield step


class _Count(TorchDispatchMode):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again, with what it sends
        if func.namespace in NAMESPACES:
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.partition("::")[2]
        given = {x.name: arg for x, arg in zip(func._schema.arguments, args, strict=False)}
        group = given.get("process_group", given.get("group_name"))
        if name in SILENT or group is None or (ranks := _size(group)) == 1:
            return
        brought = next((key for key in given if key.startswith("input")), None)
        tensors = tree_leaves(given.get(brought or "tensors", given.get("tensor")))
        tensors = [x for x in tensors if isinstance(x, Tensor)]
        elements = sum(x.numel() for x in tensors)
        item = tensors[0].element_size() if tensors else 0
        self.step.add(KIND.get(name, name), elements, item, ranks)


def _size(group: Any) -> int:
    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    size: int = group.size()
    return size


@dataclass(frozen=True)
class Sizes:
    """What a step's traffic depends on besides the layout; of a whole model, in elements."""

    parameters: tuple[tuple[int, Shape], ...]  # in order: their layer (-1: none) and their shape
    norms: tuple[int, ...]  # lengths of those of norms
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # input and output embeddings are one
    length: int  # positions of a sample
    chunk: int  # positions of which the loss has logits at once

    @classmethod
    def of(cls, model: PreTrainedModel, length: int, chunk: int) -> Self:
        """Of a whole model, on any device (meta will do), before it is laid out."""
        layers = list(decoder_layers(model))
        layer = {id(p): index for index, x in enumerate(layers) for p in x.parameters()}
        norms = [x for x in model.modules() if "norm" in type(x).__name__.lower()]
        text = model.config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            tuple((layer.get(id(p), -1), tuple(p.shape)) for p in model.parameters()),
            tuple(p.numel() for norm in norms for p in norm._parameters.values() if p is not None),
            len(layers),
            text.hidden_size,
            heads,
            getattr(text, "num_key_value_heads", None) or heads,
            getattr(text, "head_dim", None) or text.hidden_size // heads,
            text.vocab_size,
            bool(text.tie_word_embeddings),
            length,
            chunk,
        )

    def groups(self) -> list[list[Shape]]:
        """Parameters as FSDP gathers them: those of each layer, then all others."""
        order = [*range(self.layers), -1]
        return [[shape for at, shape in self.parameters if at == index] for index in order]


def expected(layout: Layout, sizes: Sizes, place: int = 0, gloo: bool = False) -> Step:
    """What a rank sends in a step of a full global batch, in closed form.

    With P parameters, L layers, A micro batches, B bytes of the hidden states of a micro batch:

    no_shard        all-reduce of all gradients once, in buckets of 25 MiB (Li et al. 2020,
                    arXiv:2006.15704, section 3.2): 2P numbers for many ranks
    zero1           reduce-scatter of the gradients, all-gather of the parameters, by bucket: 2P
                    (ZeRO, arXiv:1910.02054, section 7); times replicas, an all-reduce of a part
    shard_grad_op   all-gather and reduce-scatter of each layer and of the rest, A times: 2P A
    full_shard      the same, and each layer gathered again for its backward pass: 3P A
    hybrid_shard    the same within, and across an all-reduce of each part after each
    tensor          4 all-gathers and 4 reduce-scatters of B a layer and micro batch, for the 4
                    all-reduces of Megatron-LM (arXiv:1909.08053, figure 4; arXiv:2205.05198,
                    section 4.2.2); around the layers, see `tensor.py`
    context         4 all-to-alls a layer and micro batch (Ulysses, arXiv:2309.14509, section
                    3.2), two of q, k, v and two of the output; and the gradients as above
    pipeline        a send of B for each border between stages, micro batch and direction

    and in all of them scalars: the number of targets, the loss, the norm of the gradients.
    FSDP pads each parameter to a multiple of the ranks along its first dimension, zero1 each
    bucket. `place` is the rank's along the pipeline.

    Over `gloo`, zero1 sums gradients by an all-to-all, which sends what a reduce-scatter does.

    Raises ValueError for a layout of which this is not said: tensor or pipeline parallelism in a
    product, the deepspeed engine; and, under tensor or context, anything but fp32 without
    activation checkpointing.
    """
    data = max(layout.data, layout.context) > 1
    both = sum((data, layout.tensor > 1, layout.pipeline > 1)) > 1
    plain = layout.compute == "fp32" and layout.activation_checkpointing == "none"
    if layout.engine != "torch" or both or not (plain or layout.tensor * layout.context == 1):
        raise ValueError(f"no closed form for {layout.describe()}")
    step = Step()
    if layout.sharding in SHARDED:
        _of_shards(step, layout, sizes)
    else:
        _of_buckets(step, layout, sizes, gloo)
    if layout.context > 1:
        _of_context(step, layout, sizes)
    if layout.tensor > 1:
        _of_tensor(step, layout, sizes)
    if layout.pipeline > 1:
        _of_pipeline(step, layout, sizes, place)
    sampled = layout.data * layout.context * layout.pipeline
    for item, ranks in ((8, layout.data), (8, sampled), (4, layout.world_size)):
        if ranks > 1:  # targets int64, loss float64, norm float32
            step.add("all-reduce", 1, item, ranks)
    return step


def _of_buckets(step: Step, layout: Layout, sizes: Sizes, gloo: bool) -> None:
    """The gradients of whole parameters, and under zero1 the updated parameters."""
    parts = layout.shard * layout.context
    reduced = sharded.REDUCED[layout.reduction].itemsize
    kept = 2 if layout.compute == "bf16_pure" else 4
    for elements in _buckets(prod(shape) for _, shape in reversed(sizes.parameters)):
        if layout.sharding != "zero1" or parts == 1:
            if parts * layout.replicate > 1:
                step.add("all-reduce", elements, reduced, parts * layout.replicate)
            continue
        own = -(-elements // parts)
        step.add("all-to-all" if gloo else "reduce-scatter", own * parts, reduced, parts)
        step.add("all-gather", own, kept, parts)
        if layout.replicate > 1:
            step.add("all-reduce", own, 4, layout.replicate)


def _buckets(lengths: Iterable[int]) -> Iterator[int]:
    """Lengths of runs that end when they have reached the bytes of a bucket."""
    elements = 0
    for length in lengths:
        if elements * 4 >= replicated.BUCKET_BYTES:
            yield elements
            elements = 0
        elements += length
    yield elements


def _of_shards(step: Step, layout: Layout, sizes: Sizes) -> None:
    """Parameters gathered and gradients reduced, by FSDP's groups."""
    parts, again = layout.shard * layout.context, layout.sharding != "shard_grad_op"
    reduced = sharded.REDUCED[layout.reduction].itemsize
    gathered = AUTOCAST.get(layout.compute, torch.float32).itemsize
    if parts == 1:
        return
    *layers, rest = [
        sum(-(-shape[0] // parts) * prod(shape[1:]) for shape in group) for group in sizes.groups()
    ]
    times = layout.accumulation
    for own in layers:
        step.add("all-gather", own, gathered, parts, times * (2 if again else 1))
    step.add("all-gather", rest, 4, parts, times)
    for own in (*layers, rest):
        step.add("reduce-scatter", own * parts, reduced, parts, times)
        if layout.replicate > 1:
            step.add("all-reduce", own, reduced, layout.replicate, times)


def _of_context(step: Step, layout: Layout, sizes: Sizes) -> None:
    """Of a layer: q, k and v together and the output, and the gradients of both; in a ring, k and
    v a hop forward, and again backward with their gradients behind them."""
    ranks, times = layout.context, 2 * sizes.layers * layout.accumulation
    numbers = layout.micro_batch * sizes.length // ranks * sizes.head_size
    if layout.context_method == "ring":
        hops = 3 * (ranks - 1) * sizes.layers * layout.accumulation
        step.add("send", 2 * numbers * sizes.kv_heads, 4, ranks, hops)
        return
    keys = lcm(sizes.kv_heads, ranks)  # heads of keys are repeated until they can be dealt out
    step.add("all-to-all", numbers * (sizes.heads + 2 * keys), 4, ranks, times)
    step.add("all-to-all", numbers * sizes.heads, 4, ranks, times)


def _of_tensor(step: Step, layout: Layout, sizes: Sizes) -> None:
    """Of each micro batch: layers; embedding; leaving the layers; norms; loss, by chunks."""
    ranks, times = layout.tensor, layout.accumulation
    positions = layout.micro_batch * sizes.length
    hidden = positions * sizes.hidden
    # Gathered: before each block and in its mirror image, before the gradient enters the
    # embedding, and on leaving the base model. Scattered: the same, but for the embedding.
    step.add("all-gather", hidden // ranks, 4, ranks, times * (4 * sizes.layers + 2))
    step.add("reduce-scatter", hidden, 4, ranks, times * (4 * sizes.layers + 1))
    step.add("all-reduce", hidden, 4, ranks, times)
    for length in sizes.norms:
        step.add("all-reduce", length, 4, ranks, times)
    for start in range(0, positions, sizes.chunk):
        rows = min(sizes.chunk, positions - start)
        step.add("all-reduce", rows, 4, ranks, times)
        step.add("all-reduce", 2 * rows, 4, ranks, times)


def _of_pipeline(step: Step, layout: Layout, sizes: Sizes, place: int) -> None:
    """Hidden states to the stage after, gradients to the one before; tied embeddings."""
    last = layout.pipeline * layout.stages - 1
    stages = range(place, last + 1, layout.pipeline)
    item = 2 if layout.compute == "bf16_pure" else 4
    hidden = layout.micro_batch * sizes.length * sizes.hidden
    borders = sum((stage < last) + (stage > 0) for stage in stages)
    step.add("send", hidden, item, layout.pipeline, layout.accumulation * borders)
    if sizes.tied and place in (0, layout.pipeline - 1):
        step.add("send", sizes.vocabulary * sizes.hidden, 4, layout.pipeline)
