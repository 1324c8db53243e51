"""The engine of a layout, around the stages of this rank."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from rostra.adapt.quantized import freeze_base
from rostra.build.check import check_layout
from rostra.build.stages import cut_stages, drops_by_key, place_stage
from rostra.config import Config
from rostra.config.deepspeed import deepspeed_config, read_deepspeed
from rostra.events import Events
from rostra.layout import SHARDED, Layout
from rostra.models import has_dropout, head_splits
from rostra.models.attention import choose
from rostra.optim import LossScale, MasterWeights, Optimizers, make_optimizers, make_schedule
from rostra.parallel import Accumulate, Engine, Execute, Gradients, Mesh, Stage, TorchEngine
from rostra.parallel.deepspeed_engine import DeepSpeedEngine
from rostra.parallel.deepspeed_start import make_deepspeed_optimizers, materialize_cut, own_group
from rostra.parallel.float8 import check_float8
from rostra.parallel.in_backward import InBackwardEngine, optimizers_by_parameter
from rostra.parallel.pipeline import Pipeline
from rostra.parallel.replicated import Buckets
from rostra.parallel.sharded import REDUCED, Sharded
from rostra.parallel.single import OnHost, Single
from rostra.parallel.stage import AUTOCAST
from rostra.parallel.states import materialize
from rostra.pieces import Reader


def build_engine(
    config: Config,
    layout: Layout,
    model: PreTrainedModel,
    device: torch.device,
    total_steps: int,
    events: Events,
    weights: Reader | None = None,
    memory: AbstractContextManager[Any] | None = None,
) -> Engine:
    """The engine that trains `model` as `layout` says, for `total_steps` steps.

    Collective over the layout's ranks. A model on the meta device takes its weights from
    `weights`, each rank only what it holds; within `memory`, if given, a mode of fake tensors.
    Raises RequestError for a layout that this model does not
    allow.
    """
    check_layout(config, layout, model.config)
    if layout.compute == "fp8":
        check_float8(device)
    if layout.world_size > 1 and has_dropout(model):
        events.notice(
            "this model has dropout, which ranks draw each for themselves: the loss is that of one "
            "process in distribution, not number by number"
        )
    mesh = Mesh.of(layout, device)
    model.train()
    model.config.use_cache = False
    length, asked = config.data.sequence_length, config.model.attention
    packed = config.data.isolate_documents and layout.micro_batch > 1
    splits = head_splits(model)  # on the CPU still: before a kernel that only CUDA has is chosen
    model.set_attn_implementation(choose(asked, device, length, layout.compile, packed))
    if config.adapter.dropout and layout.world_size > 1 and not drops_by_key(layout):
        events.notice(
            "adapter.dropout: in a pipeline that computes parts of layers again, ranks draw each "
            "for themselves: the loss is one process's in distribution, not number by number"
        )
    if layout.adapter != "none":
        freeze_base(model, AUTOCAST.get(layout.compute, torch.float32))
    if not splits:
        events.notice("this model's head cannot be split off: all its logits exist at once")
    order = _Order(config, layout, model, mesh, splits, total_steps, weights)
    if layout.engine == "deepspeed":
        with memory or nullcontext():
            return _deepspeed_engine(order)
    return _torch_engine(order, memory or nullcontext())


@dataclass(frozen=True)
class _Order:
    """What an engine is made of."""

    config: Config
    layout: Layout
    model: PreTrainedModel
    mesh: Mesh
    splits: bool  # whether the head can be split off
    total_steps: int
    weights: Reader | None

    def place(self, part: PreTrainedModel, first: bool = True, last: bool = True) -> Stage:
        return place_stage(part, self.config, self.layout, self.mesh, self.splits, first, last)

    def fields(self) -> dict[str, Any]:
        """Those of any engine, but for its stages and optimizers; before the model is cut."""
        return {
            "schedule": make_schedule(self.config.schedule, self.total_steps),
            "layout": self.layout,
            "shape": copy.deepcopy(self.model.config),
            "mesh": self.mesh,
            "clip": self.config.stability.clip,
            "scale": _loss_scale(self.layout),
            "rows": _rows(self.config, self.layout, self.mesh),
        }


def _torch_engine(order: _Order, memory: AbstractContextManager[Any]) -> TorchEngine:
    config, layout, model, mesh = order.config, order.layout, order.model, order.mesh
    fields, embeddings = order.fields(), _embeddings(model)
    if order.weights is None:
        model.to(mesh.device)
    stages = [
        order.place(part, first, last) for part, first, last in cut_stages(model, layout, mesh)
    ]
    host = torch.device("cpu") if layout.offload_parameters == "cpu" else None
    with memory:
        for stage in stages:
            if order.weights is not None:
                materialize(stage, mesh.device, order.weights, host)
        gradients = hold_gradients(stages, layout, mesh)
    execute: Execute = Accumulate(stages[0], gradients.before)
    if layout.pipeline > 1:
        execute = Pipeline(stages, mesh, gradients.so_far)
    kind = InBackwardEngine if layout.optimizer_in_backward else TorchEngine
    optimizers = hold_optimizers(config, layout, gradients, embeddings)
    return kind(
        stages=stages, execute=execute, gradients=gradients, optimizers=optimizers, **fields
    )


def _deepspeed_engine(order: _Order) -> DeepSpeedEngine:
    config, layout, model, mesh = order.config, order.layout, order.model, order.mesh
    file = config.parallel.deepspeed if config.parallel != "auto" else None
    made = deepspeed_config(
        layout,
        config.optimizer,
        clip=config.stability.clip,
        samples=config.train.global_batch_size,
        parameters=sum(p.numel() for p in model.parameters()),
        largest=max(p.numel() for p in model.parameters()),
        nvme_path=config.memory.offload.path,
        user=None if file is None else read_deepspeed(file),
    )
    fields, embeddings = order.fields(), _embeddings(model)
    stage = order.place(model)
    with own_group(mesh.device) as own:
        if order.weights is None:
            model.to(mesh.device)
        elif layout.sharding == "full_shard":
            materialize_cut(model, made, order.weights, mesh.device)
        else:
            materialize(stage, mesh.device, order.weights)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        ratio = config.adapter.lora_plus_ratio
        optimizers = make_deepspeed_optimizers(config.optimizer, named, embeddings, layout, ratio)
        return DeepSpeedEngine(
            stages=[stage], optimizers=optimizers, config=made, own_group=own, **fields
        )


def _loss_scale(layout: Layout) -> LossScale:
    return LossScale(2.0**16, growth=2000) if layout.compute == "fp16" else LossScale()


def _rows(config: Config, layout: Layout, mesh: Mesh) -> int:
    """Samples that every rank runs, empty ones included; in a pipeline all of one shape."""
    if mesh.grid is None:
        return 0
    if layout.pipeline > 1:
        return layout.micro_batch * layout.accumulation
    return -(-config.train.global_batch_size // layout.data)


def hold_gradients(stages: list[Stage], layout: Layout, mesh: Mesh) -> Gradients:
    """Who sums the gradients of what trains, and what this rank updates of it."""
    named = [
        (stage.aliases.get(name, name), parameter)
        for stage in stages
        for name, parameter in stage.model.named_parameters()
        if parameter.requires_grad
    ]
    pure = torch.bfloat16 if layout.compute == "bf16_pure" else None
    host = torch.device("cpu") if layout.offload_optimizer == "cpu" else None
    gradients: Gradients
    if mesh.grid is None:
        gradients = Single(named, MasterWeights(named, pure, host) if pure or host else None)
    elif layout.sharding in SHARDED:
        gradients = Sharded(named, mesh)
    else:
        gradients = Buckets(
            named, mesh, layout.sharding == "zero1", REDUCED[layout.reduction], pure
        )
    if host is not None and mesh.grid is not None:
        gradients = OnHost(gradients)
    copies = {name for stage in stages for name in stage.aliases.values()}
    for held in gradients.held:
        if held.name in copies:
            held.written = held.counted = False
    return gradients


def hold_optimizers(
    config: Config, layout: Layout, gradients: Gradients, embeddings: set[str]
) -> Optimizers:
    """The optimizer of the config over what this rank holds."""
    named = [(held.name, held.value) for held in gradients.held]
    states, compiled = layout.optimizer_states, layout.compile
    ratio = config.adapter.lora_plus_ratio
    if layout.optimizer_in_backward:
        return optimizers_by_parameter(config.optimizer, named, embeddings, states, compiled, ratio)
    parts = {held.name: held.part for held in gradients.held}
    return make_optimizers(config.optimizer, named, embeddings, states, compiled, parts, ratio)


def _embeddings(model: PreTrainedModel) -> set[str]:
    """Names of the input and output embeddings."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = {id(p) for m in modules if m is not None for p in m.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in weights}
