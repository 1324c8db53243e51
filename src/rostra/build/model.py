"""The model of a config: made from a seed, or pretrained; whole, or in parts; with adapters."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from rostra.adapt import GrownWeights, grow_embeddings
from rostra.adapt.quantized_weights import folder_identity
from rostra.build.tuned import Built, tune
from rostra.config import Config
from rostra.errors import RequestError
from rostra.events import Events
from rostra.models import (
    SeededWeights,
    create_model,
    load_model,
    local_folder,
    model_on_meta,
    pretrained_on_meta,
    pretrained_reader,
    scratch_config,
    special_tokens,
    takes_positions,
)


def check_model(config: Config) -> None:
    """Refuse an impossible shape before any data is read."""
    if config.model.pretrained is None:
        special: dict[str, int | None] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        scratch_config(config.model, 1, config.data.sequence_length, special)


def build_model(
    config: Config, tokenizer: Any, vocabulary: int, events: Events, in_parts: bool
) -> Built:
    """The model of the config in float32, made for `tokenizer`, whose token ids are all below
    `vocabulary`; on the CPU with its weights, or, `in_parts` or tuned, on the meta device with a
    reader of them, so that no host holds it whole."""
    section, length = config.model, config.data.sequence_length
    if config.adapter.kind != "none":
        built = _tuned(config, tokenizer, vocabulary, events)
    elif section.pretrained is not None:
        built = _pretrained(section.pretrained, vocabulary, config, events, in_parts)
    else:
        shape = scratch_config(section, vocabulary, length, special_tokens(tokenizer))
        seed = config.run.seed
        built = (
            Built(model_on_meta(shape), SeededWeights(shape, seed))
            if in_parts
            else Built(create_model(shape, seed))
        )
    _check_fit(built.model, vocabulary, config)
    return built


def _pretrained(
    path: str, vocabulary: int, config: Config, events: Events, in_parts: bool
) -> Built:
    table = config.data.tokenizer
    added = bool(table.added or table.special)
    if not in_parts and not added:
        return Built(load_model(path))
    model = pretrained_on_meta(path)
    weights = pretrained_reader(path, model.config, events.notice)
    grown = grow_embeddings(model, vocabulary) if added else None
    if grown is not None:
        events.notice(grown.notice)
        weights = GrownWeights(weights, grown)
    return Built(model, weights)


def _tuned(config: Config, tokenizer: Any, vocabulary: int, events: Events) -> Built:
    path = config.model.pretrained
    assert path is not None, "the config refuses adapters without"
    model = pretrained_on_meta(path)
    base = pretrained_reader(path, model.config, events.notice)
    grown = grow_embeddings(model, vocabulary)
    if grown is not None:
        events.notice(grown.notice)
        base = GrownWeights(base, grown)
    text = config.adapter.prompt
    prompt = tokenizer(text, add_special_tokens=False).input_ids if text else ()
    folder = local_folder(path)
    modules = () if grown is None else grown.modules
    identity = folder_identity(folder)
    return tune(model, base, config, identity=identity, prompt=prompt, grown=modules)


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
