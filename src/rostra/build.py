"""From config and layout to a model on its devices, and the engine that trains it.

The one place where loading, attention, compiling, precision and optimizer meet, in this
order: model (created or loaded) → attention → precision of the weights → compile → optimizer →
engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rostra.batch import Batch
from rostra.config import Config
from rostra.errors import RequestError
from rostra.events import Events
from rostra.layout import Layout
from rostra.models import (
    Head,
    create_model,
    decoder_layers,
    load_model,
    scratch_config,
    special_tokens,
    split_head,
    takes_positions,
)
from rostra.models.attention import choose
from rostra.optim import (
    LossScale,
    MasterWeights,
    chunked_cross_entropy,
    cross_entropy_sum,
    make_optimizers,
    make_schedule,
)
from rostra.parallel import Loss, TorchEngine


def check_model(config: Config) -> None:
    """Refuse an impossible shape before any data is read."""
    if config.model.pretrained is None:
        scratch_config(config.model, 1, config.data.sequence_length, {})


def build_model(
    config: Config, tokenizer: Any, vocabulary: int, device: torch.device
) -> PreTrainedModel:
    """The model of the config in float32 on `device`, made for `tokenizer`, whose token ids
    are all below `vocabulary`."""
    section, length = config.model, config.data.sequence_length
    if section.pretrained is not None:
        model = load_model(section.pretrained)
    else:
        shape = scratch_config(section, vocabulary, length, special_tokens(tokenizer))
        model = create_model(shape, config.run.seed)
    _check_fit(model, vocabulary, config)
    return model.to(device)


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
) -> TorchEngine:
    """The engine that trains `model` as `layout` says, for `total_steps` steps."""
    model.train()
    model.config.use_cache = False
    length, asked = config.data.sequence_length, config.model.attention
    packed = config.data.isolate_documents and layout.micro_batch > 1
    model.set_attn_implementation(choose(asked, device, length, layout.compile, packed))
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    pure = layout.compute == "bf16_pure"
    master = MasterWeights(named, torch.bfloat16) if pure else None
    head = split_head(model)
    if head is None:
        events.notice("this model's head cannot be split off: all its logits exist at once")
    if layout.compile:
        compile_layers(model)
    fp16 = layout.compute == "fp16"
    return TorchEngine(
        model=model,
        loss=make_loss(
            head, config.train.loss_chunk, config.data.isolate_documents, layout.compile
        ),
        optimizers=make_optimizers(
            config.optimizer, master.named if master else named, _embeddings(model)
        ),
        schedule=make_schedule(config.schedule, total_steps),
        layout=layout,
        device=device,
        clip=config.stability.clip,
        scale=LossScale(2.0**16, growth=2000) if fp16 else LossScale(),
        master=master,
    )


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each transformer layer by itself: the layers share one compiled graph."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=False)


def make_loss(head: Head | None, chunk: int, isolate: bool, compiled: bool) -> Loss:
    """The loss of a micro batch, by chunks of logits where the head can be split off."""

    def inputs(batch: Batch) -> dict[str, Any]:
        positions = {"position_ids": batch.position_ids} if isolate else {}
        return {"input_ids": batch.input_ids, "use_cache": False, **positions}

    def by_chunks(model: PreTrainedModel, batch: Batch, factor: float) -> tuple[Tensor, Tensor]:
        assert head is not None
        hidden = model.base_model(**inputs(batch)).last_hidden_state
        weight, bias = head.layer.weight, head.layer.bias
        return chunked_cross_entropy(
            hidden,
            weight,
            batch.labels,
            scale=factor,
            chunk=chunk,
            bias=bias,
            softcap=head.softcap,
            compiled=compiled,
        )

    def whole(model: PreTrainedModel, batch: Batch, factor: float) -> tuple[Tensor, Tensor]:
        total = cross_entropy_sum(model(**inputs(batch)).logits, batch.labels)
        return total * factor, total.detach()

    return by_chunks if head is not None else whole


def _embeddings(model: PreTrainedModel) -> set[str]:
    """Names of the input and output embeddings."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = {id(p) for m in modules if m is not None for p in m.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in weights}
