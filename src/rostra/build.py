"""From config and layout to a model on its devices, and the engine that trains it.

The one place where loading, attention, compiling, precision and optimizer meet, in this
order: model (created or loaded) → attention → precision of the weights → compile → optimizer →
engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rostra.batch import Batch
from rostra.config import Config
from rostra.errors import RequestError
from rostra.events import Events
from rostra.layout import SHARDED, Layout
from rostra.models import (
    Head,
    create_model,
    head_splits,
    load_model,
    output_head,
    scratch_config,
    special_tokens,
    takes_positions,
)
from rostra.models.attention import choose
from rostra.models.weights import (
    SeededWeights,
    model_on_meta,
    pretrained_on_meta,
    pretrained_reader,
)
from rostra.optim import (
    LossScale,
    MasterWeights,
    Optimizers,
    chunked_cross_entropy,
    cross_entropy_sum,
    make_optimizers,
    make_schedule,
)
from rostra.parallel import Accumulate, Execute, Gradients, Inputs, Loss, Mesh, Stage, TorchEngine
from rostra.parallel.activations import checkpoint_activations
from rostra.parallel.context import Ulysses, check_context, split_context
from rostra.parallel.float8 import check_float8, to_float8
from rostra.parallel.in_backward import InBackwardEngine, optimizers_by_parameter
from rostra.parallel.pipeline import Pipeline, check_pipeline
from rostra.parallel.pipeline_split import (
    balance,
    check_stages,
    layer_costs,
    own_layers,
    split_layers,
    tied_aliases,
)
from rostra.parallel.replicated import Buckets
from rostra.parallel.sharded import REDUCED, Sharded, shard
from rostra.parallel.single import Single
from rostra.parallel.states import materialize
from rostra.parallel.tensor import check_tensor, split_tensors, vocabulary_shard
from rostra.pieces import Reader


def check_model(config: Config) -> None:
    """Refuse an impossible shape before any data is read."""
    if config.model.pretrained is None:
        special: dict[str, int | None] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        scratch_config(config.model, 1, config.data.sequence_length, special)


def build_model(
    config: Config, tokenizer: Any, vocabulary: int, events: Events, in_parts: bool
) -> tuple[PreTrainedModel, Reader | None]:
    """The model of the config in float32, made for `tokenizer`, whose token ids are all below
    `vocabulary`; on the CPU with its weights, or, `in_parts`, on the meta device with a reader
    of them, so that no rank holds it whole."""
    section, length = config.model, config.data.sequence_length
    weights: Reader | None = None
    if section.pretrained is not None and in_parts:
        model = pretrained_on_meta(section.pretrained)
        weights = pretrained_reader(section.pretrained, model.config, events.notice)
    elif section.pretrained is not None:
        model = load_model(section.pretrained)
    else:
        shape = scratch_config(section, vocabulary, length, special_tokens(tokenizer))
        model = model_on_meta(shape) if in_parts else create_model(shape, config.run.seed)
        weights = SeededWeights(shape, config.run.seed) if in_parts else None
    _check_fit(model, vocabulary, config)
    return model, weights


def _check_fit(model: PreTrainedModel, vocabulary: int, config: Config) -> None:
    """Refuse what would fail in the first step, or train without sense."""
    rows = model.get_input_embeddings().weight.shape[0]
    if vocabulary > rows:
        raise RequestError(
            f"data.tokenizer: has {vocabulary:,} tokens, but the model only {rows:,} "
            "embeddings; use the model's own tokenizer (leave data.tokenizer out)"
        )
    positions = _positions(model.config)
    if positions is not None and config.data.sequence_length > positions:
        raise RequestError(
            f"data.sequence_length = {config.data.sequence_length}: this model is made for at "
            f"most {positions} positions"
        )
    if config.data.isolate_documents and not takes_positions(model):
        raise RequestError(
            f"data.isolate_documents: a {type(model).__name__} takes no position ids, so its "
            "attention cannot be kept within documents; set data.isolate_documents: false"
        )


def _positions(config: PretrainedConfig) -> int | None:
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def build_engine(
    config: Config,
    layout: Layout,
    model: PreTrainedModel,
    device: torch.device,
    total_steps: int,
    events: Events,
    weights: Reader | None = None,
) -> TorchEngine:
    """The engine that trains `model` as `layout` says, for `total_steps` steps.

    Collective over the layout's ranks. A model on the meta device takes its weights from
    `weights`, each rank only what it holds. Raises RequestError for a layout that this model
    does not allow.
    """
    check_layout(config, layout, model.config)
    if layout.compute == "fp8":
        check_float8(device)
    shape = copy.deepcopy(model.config)
    mesh = Mesh.of(layout, device)
    model.train()
    model.config.use_cache = False
    length, asked = config.data.sequence_length, config.model.attention
    packed = config.data.isolate_documents and layout.micro_batch > 1
    model.set_attn_implementation(choose(asked, device, length, layout.compile, packed))
    splits = head_splits(model)
    if not splits:
        events.notice("this model's head cannot be split off: all its logits exist at once")
    embeddings = _embeddings(model)
    if weights is None:
        model.to(device)
    stages = [
        place_stage(part, config, layout, mesh, splits, first, last)
        for part, first, last in cut_stages(model, layout, mesh)
    ]
    if weights is not None:
        for stage in stages:
            materialize(stage, device, weights)
    gradients = hold_gradients(stages, layout, mesh)
    execute: Execute = Accumulate(stages[0], gradients.before)
    if layout.pipeline > 1:
        execute = Pipeline(stages, mesh, gradients.so_far)
    rows = 0 if mesh.grid is None else -(-config.train.global_batch_size // layout.data)
    kind = InBackwardEngine if layout.optimizer_in_backward else TorchEngine
    return kind(
        stages=stages,
        execute=execute,
        gradients=gradients,
        optimizers=hold_optimizers(config, layout, gradients, embeddings),
        schedule=make_schedule(config.schedule, total_steps),
        layout=layout,
        shape=shape,
        mesh=mesh,
        clip=config.stability.clip,
        scale=LossScale(2.0**16, growth=2000) if layout.compute == "fp16" else LossScale(),
        rows=layout.micro_batch * layout.accumulation if layout.pipeline > 1 else rows,
    )


def hold_optimizers(
    config: Config, layout: Layout, gradients: Gradients, embeddings: set[str]
) -> Optimizers:
    """The optimizer of the config over what this rank holds."""
    named = [(held.name, held.value) for held in gradients.held]
    states, compiled = layout.optimizer_states, layout.compile
    if layout.optimizer_in_backward:
        return optimizers_by_parameter(config.optimizer, named, embeddings, states, compiled)
    parts = {held.name: held.part for held in gradients.held}
    return make_optimizers(config.optimizer, named, embeddings, states, compiled, parts)


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


def hold_gradients(stages: list[Stage], layout: Layout, mesh: Mesh) -> Gradients:
    """Who sums the gradients of what trains, and what this rank updates of it."""
    named = [
        (stage.aliases.get(name, name), parameter)
        for stage in stages
        for name, parameter in stage.model.named_parameters()
        if parameter.requires_grad
    ]
    pure = torch.bfloat16 if layout.compute == "bf16_pure" else None
    gradients: Gradients
    if mesh.grid is None:
        gradients = Single(named, MasterWeights(named, pure) if pure else None)
    elif layout.sharding in SHARDED:
        gradients = Sharded(named, mesh)
    else:
        gradients = Buckets(
            named, mesh, layout.sharding == "zero1", REDUCED[layout.reduction], pure
        )
    copies = {name for stage in stages for name in stage.aliases.values()}
    for held in gradients.held:
        if held.name in copies:
            held.written = held.counted = False
    return gradients


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
    isolate, chunk = config.data.isolate_documents, config.train.loss_chunk
    inputs: Inputs = partial(whole_inputs, isolate=isolate)
    head = output_head(model) if splits and last else None
    aliases = tied_aliases(model) if layout.pipeline > 1 else {}
    if layout.compute == "fp8":
        to_float8(model)
    if layout.tensor > 1:
        split_tensors(model, mesh.part("tensor"), last=last)
    if layout.context > 1:
        inputs = partial(context_inputs, split_context(model, mesh.part("context")), isolate)
    checkpoint_activations(model, layout.activation_checkpointing)
    if layout.compile:
        compile_layers(model)
    stage = Stage(model, make_loss(head, chunk, layout.compile), inputs, first, last, aliases)
    if layout.sharding in SHARDED and mesh.grid is not None:
        shard(stage, own_layers(model), mesh, layout)
    return stage


def context_inputs(ulysses: Ulysses, isolate: bool, batch: Batch) -> tuple[dict[str, Any], Tensor]:
    """What the model is called with for this rank's positions, and their labels."""
    return ulysses.inputs(batch, isolate), ulysses.part(batch.labels)


def whole_inputs(batch: Batch, isolate: bool) -> tuple[dict[str, Any], Tensor]:
    """What the model is called with for all positions of a micro batch, and their labels."""
    positions = {"position_ids": batch.position_ids} if isolate else {}
    return {"input_ids": batch.input_ids, "use_cache": False, **positions}, batch.labels


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each transformer layer by itself: the layers share one compiled graph."""
    for layer in own_layers(model):
        layer.compile(dynamic=False)


def make_loss(head: Head | None, chunk: int, compiled: bool) -> Loss:
    """The loss of a micro batch, by chunks of logits where the head can be split off."""

    def by_chunks(
        model: PreTrainedModel, inputs: dict[str, Any], labels: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        assert head is not None
        hidden = model.base_model(**inputs).last_hidden_state
        weight, vocabulary = vocabulary_shard(head.layer.weight)
        bias = None if head.layer.bias is None else vocabulary_shard(head.layer.bias)[0]
        return chunked_cross_entropy(
            hidden,
            weight,
            labels,
            scale=factor,
            chunk=chunk,
            bias=bias,
            softcap=head.softcap,
            compiled=compiled and vocabulary is None,
            vocabulary=vocabulary,
        )

    def whole(
        model: PreTrainedModel, inputs: dict[str, Any], labels: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        total = cross_entropy_sum(model(**inputs).logits, labels)
        return total * factor, total.detach()

    return by_chunks if head is not None else whole


def check_layout(config: Config, layout: Layout, shape: PretrainedConfig) -> None:
    """Raises RequestError for what this model or this config does not allow of a layout."""
    length, size = config.data.sequence_length, config.train.global_batch_size
    check_tensor(shape, layout.tensor, length // layout.context)
    check_context(shape, layout.context, length, layout.tensor)
    check_pipeline(layout, shape.get_text_config().num_hidden_layers)
    if layout.pipeline > 1:
        check_stages(shape)
    name = config.optimizer.name
    cut_up = layout.sharding not in ("no_shard",) or layout.tensor > 1
    if name in ("muon", "adafactor") and cut_up and layout.world_size > 1:
        raise RequestError(
            f"optimizer.name = {name}: needs whole matrices, which parallel.sharding = "
            f"{layout.sharding} and parallel.tensor cut up; use adamw, or parallel.sharding: "
            "no_shard with parallel.tensor: 1"
        )
    if layout.data > size:
        raise RequestError(
            f"train.global_batch_size = {size}: leaves some of the {layout.data} data ranks "
            f"(parallel.replicate x parallel.shard) without a sample; set it to {layout.data} "
            "or more"
        )


def _embeddings(model: PreTrainedModel) -> set[str]:
    """Names of the input and output embeddings."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = {id(p) for m in modules if m is not None for p in m.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in weights}
