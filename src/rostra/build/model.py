"""The model of a config: made from a seed, or pretrained; whole, or in parts."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from rostra.config import Config
from rostra.errors import RequestError
from rostra.events import Events
from rostra.models import (
    SeededWeights,
    create_model,
    load_model,
    model_on_meta,
    pretrained_on_meta,
    pretrained_reader,
    scratch_config,
    special_tokens,
    takes_positions,
)
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
