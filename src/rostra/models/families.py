"""Architectures that can be built from scratch, and named shapes of them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from rostra.config import ModelSection
from rostra.errors import RequestError

# Rostra's name of a size, and transformers' (GPT-2 has names of its own).
_NAMES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "intermediate_size": "intermediate_size",
    "positions": "max_position_embeddings",
}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "intermediate_size": "n_inner",
    "positions": "n_positions",
}


@dataclass(frozen=True)
class Family:
    """One architecture: transformers' model type, and how sizes are called there."""

    model_type: str
    names: dict[str, str] = field(default_factory=lambda: _NAMES)
    dropouts: tuple[str, ...] = ("attention_dropout",)
    tied: bool = False  # input and output embeddings, unless the size says otherwise


FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "qwen3": Family("qwen3"),
    "mistral": Family("mistral"),
    "gemma3": Family("gemma3_text", tied=True),
    "gpt2": Family("gpt2", _GPT2_NAMES, ("resid_pdrop", "embd_pdrop", "attn_pdrop"), tied=True),
}


def _shape(
    hidden: int, layers: int, heads: int, kv: int, feed_forward: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv,
        "intermediate_size": feed_forward,
        **more,
    }


# The published shapes are those of the models' own config.json.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", _shape(64, 2, 4, 2, 128)),
    "demosthenes": ("llama", _shape(256, 7, 4, 4, 704)),
    "llama-34m": ("llama", _shape(512, 8, 8, 8, 1376)),
    "llama-125m": ("llama", _shape(768, 12, 12, 12, 2048)),
    "llama-3.2-1b": (
        "llama",
        _shape(2048, 16, 32, 8, 8192, head_size=64, tie_embeddings=True, positions=131072),
    ),
    "llama-3-8b": ("llama", _shape(4096, 32, 32, 8, 14336, positions=8192)),
    "qwen3-0.6b": (
        "qwen3",
        _shape(1024, 28, 16, 8, 3072, head_size=128, tie_embeddings=True, positions=40960),
    ),
    "mistral-7b": ("mistral", _shape(4096, 32, 32, 8, 14336, positions=32768)),
    "gemma3-1b": (
        "gemma3",
        _shape(1152, 26, 4, 1, 6912, head_size=256, tie_embeddings=True, positions=32768),
    ),
    "gpt2": ("gpt2", _shape(768, 12, 12, 12, 3072, tie_embeddings=True, positions=1024)),
}


def scratch_config(
    section: ModelSection, vocabulary: int, sequence_length: int, special: dict[str, int | None]
) -> PretrainedConfig:
    """The transformers config of a model from scratch.

    `special` gives the tokenizer's `bos_token_id`, `eos_token_id` and `pad_token_id`.
    Raises RequestError for an unknown preset or a size that the architecture cannot have.
    """
    architecture: str | None = section.architecture
    size: dict[str, Any] = {}
    if section.preset is not None:
        if section.preset not in PRESETS:
            near = difflib.get_close_matches(section.preset, PRESETS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RequestError(
                f"model.preset = {section.preset!r}: unknown; {hint}known: {', '.join(PRESETS)}"
            )
        preset_architecture, size = PRESETS[section.preset]
        if architecture not in (None, preset_architecture):
            raise RequestError(
                f"model.architecture = {architecture!r}: preset {section.preset!r} is a "
                f"{preset_architecture}; remove one of the two"
            )
        architecture = preset_architecture
    size = size | section.size.model_dump(exclude_none=True)
    assert architecture is not None  # the config's own check
    _check_size(architecture, size, sequence_length)
    return _transformers_config(FAMILIES[architecture], size, vocabulary, sequence_length, special)


def _check_size(architecture: str, size: dict[str, Any], sequence_length: int) -> None:
    if missing := [k for k in ("hidden_size", "layers", "heads") if k not in size]:
        raise RequestError(
            f"model.size: give {', '.join(missing)} for a {architecture} from scratch, "
            f"or a preset: {', '.join(PRESETS)}"
        )
    hidden, heads, kv_heads = size["hidden_size"], size["heads"], size.get("kv_heads")
    if "head_size" not in size and hidden % heads:
        raise RequestError(
            f"model.size.heads = {heads}: does not divide hidden_size ({hidden}); "
            "change one, or give head_size"
        )
    if kv_heads and heads % kv_heads:
        raise RequestError(f"model.size.kv_heads = {kv_heads}: does not divide heads ({heads})")
    if architecture == "gpt2" and kv_heads not in (None, heads):
        raise RequestError(f"model.size.kv_heads = {kv_heads}: gpt2 has one for each head; remove")
    if size.get("positions", sequence_length) < sequence_length:
        raise RequestError(
            f"data.sequence_length = {sequence_length}: longer than model.size.positions "
            f"({size['positions']}); shorten the one or raise the other"
        )


def _transformers_config(
    family: Family,
    size: dict[str, Any],
    vocabulary: int,
    sequence_length: int,
    special: dict[str, int | None],
) -> PretrainedConfig:
    values: dict[str, Any] = {
        theirs: size[ours] for ours, theirs in family.names.items() if ours in size
    }
    values.setdefault(family.names["positions"], max(sequence_length, 2048))
    if "kv_heads" in family.names:
        values.setdefault("num_key_value_heads", size["heads"])
    if "head_size" in family.names:
        values.setdefault("head_dim", size["hidden_size"] // size["heads"])
        values.setdefault("intermediate_size", -(-size["hidden_size"] * 8 // 3 // 32) * 32)
    values.update(dict.fromkeys(family.dropouts, size.get("dropout", 0.0)))
    values["tie_word_embeddings"] = size.get("tie_embeddings", family.tied)
    try:
        return AutoConfig.for_model(family.model_type, vocab_size=vocabulary, **values, **special)
    except StrictDataclassError as error:
        reason = str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ")
        raise RequestError(f"model.size: a {family.model_type} cannot be so: {reason}") from error
