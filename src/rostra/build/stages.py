"""The stages of a rank: the transforms of a layout on an unchanged model, in their order.

cut into pipeline stages → fp8 → tensor → context → noise and dropout by key → activation
checkpointing → compile → shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rostra.adapt import Keys, Neftune, attend_to_prefix, key_dropout
from rostra.build.objective import context_inputs, make_loss, whole_inputs
from rostra.config import Config
from rostra.layout import SHARDED, Layout
from rostra.models import output_head
from rostra.models.experts import autocast_experts
from rostra.parallel import Inputs, Mesh, Stage
from rostra.parallel.activations import checkpoint_activations
from rostra.parallel.context import split_context
from rostra.parallel.float8 import to_float8
from rostra.parallel.pipeline_split import (
    balance,
    layer_costs,
    own_layers,
    split_layers,
    tied_aliases,
)
from rostra.parallel.recast import cast_at_each_use
from rostra.parallel.ring import split_ring
from rostra.parallel.sharded import shard
from rostra.parallel.stage import AUTOCAST
from rostra.parallel.tensor import split_tensors


def cut_stages(
    model: PreTrainedModel, layout: Layout, mesh: Mesh
) -> Iterator[tuple[PreTrainedModel, bool, bool]]:
    """The model of each pipeline stage of this rank, and whether it is the first, the last."""
    count = layout.pipeline * layout.stages
    if count == 1:
        yield model, True, True
        return
    cuts = balance(layer_costs(model), count)
    for index in range(layout.stages):
        place = index * layout.pipeline + mesh.coordinate("pipeline")
        part = copy.deepcopy(model) if index < layout.stages - 1 else model
        split_layers(part, place, count, cuts)
        yield part, place == 0, place == count - 1


def place_stage(
    model: PreTrainedModel,
    config: Config,
    layout: Layout,
    mesh: Mesh,
    splits: bool,
    first: bool,
    last: bool,
) -> Stage:
    """The transforms of one stage, in their order, on a model that is cut already."""
    isolate = config.data.isolate_documents
    vocabulary = model.config.get_text_config().vocab_size
    chunk = config.train.loss_chunk or loss_chunk(vocabulary, mesh.device.type != "cpu")
    prefix = layout.adapter == "prefix"
    inputs: Inputs = partial(whole_inputs, isolate=isolate, prefix=prefix)
    head = output_head(model) if splits and last else None
    aliases = tied_aliases(model) if layout.pipeline > 1 else {}
    if layout.compute == "fp8":
        to_float8(model, layout.tensor)
    if layout.tensor > 1:
        split_tensors(model, mesh.part("tensor"), last=last)
    part: Callable[[Tensor], Tensor] = _all_positions
    if layout.context > 1:
        split = split_ring if layout.context_method == "ring" else split_context
        context = split(model, mesh.part("context"))
        part, inputs = context.part, partial(context_inputs, context, isolate, prefix)
    if prefix:
        attend_to_prefix(model)
    keys = Keys(config.run.seed)
    if first and config.train.neftune_alpha is not None:
        inputs = Neftune(config.train.neftune_alpha, keys).attach(model, inputs, part)
    if drops_by_key(layout):
        inputs = key_dropout(model, keys, inputs, part)
    checkpoint_activations(model, layout.activation_checkpointing, layout.splits_backward)
    if layout.compile:
        compile_layers(model)
    loss, dtype = make_loss(head, chunk, layout.compile), AUTOCAST.get(layout.compute)
    if dtype is not None:
        autocast_experts(model)
    gathers = layout.engine == "deepspeed" and layout.sharding == "full_shard"
    autocast = cast_at_each_use if gathers else torch.autocast
    cast = nullcontext if dtype is None else partial(autocast, mesh.device.type, dtype)
    stage = Stage(model, loss, inputs, first, last, aliases, cast, keys)
    if layout.engine == "torch" and layout.sharding in SHARDED and mesh.grid is not None:
        shard(stage, own_layers(model), mesh, layout)
    return stage


def loss_chunk(vocabulary: int, on_gpu: bool) -> int:
    """Positions whose logits exist at once, when nobody says: four times 32 MB of float32, or
    256 MB on a GPU, where the head's gradient, read and written for each chunk, is what a loss
    takes longest for. More than 1,024 make no product quicker."""
    return max(1, min(1024, (1 << (26 if on_gpu else 23)) // vocabulary))


def drops_by_key(layout: Layout) -> bool:
    """Whether what LoRA drops is the same as in one process. In a pipeline, parts of layers that
    are computed again find the keys of another micro batch."""
    apart = layout.activation_checkpointing in ("selective:attention", "selective:mlp")
    return layout.pipeline == 1 or not apart


def _all_positions(tensor: Tensor) -> Tensor:
    return tensor


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each transformer layer by itself: the layers share one compiled graph."""
    for layer in own_layers(model):
        layer.compile(dynamic=False)
