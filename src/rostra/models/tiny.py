"""A model of milliseconds of any family, for trying what its code does."""

from __future__ import annotations

import copy
from contextlib import suppress
from math import gcd
from typing import Any

from transformers import PretrainedConfig

# Keys that a family lacks are left out.
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """A config of the same family, with every kind of its layers and its ratio of key/value
    heads as far as four heads allow."""
    tiny = copy.deepcopy(config)
    text = tiny.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ["full_attention"]))
    count = max(4, len(kinds))
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    values = _SIZES | {
        "num_hidden_layers": count,
        "num_key_value_heads": max(1, 4 * shared // heads),
        "layer_types": (kinds * count)[:count],
    }
    for key, value in values.items():
        if getattr(text, key, None) is not None:
            _set(text, key, value)
    return tiny


# What a shrunk model has, where its family has the key: widths, but no counts.
_WIDTHS = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_EVEN = 720720  # the least common multiple of 1 to 16


def shrunk(config: PretrainedConfig, layers: int, length: int) -> PretrainedConfig:
    """A narrow, shallow config of the same family that can be laid out as `config` can.

    What decides how a model is split stays: the numbers of query and key/value heads and of
    experts, tied embeddings, the kinds of layers in the order in which they first appear, and
    by which numbers up to 16 the MLP and the vocabulary divide. `layers` are at least as many
    as there are kinds, and at most as many as `config` has. A sliding window is shorter than
    samples of `length` positions. Nothing is dropped out.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ["full_attention"]))
    count = min(text.num_hidden_layers, max(layers, len(kinds)))
    heads = text.num_attention_heads
    own = getattr(text, "head_dim", None) or getattr(text, "qk_rope_head_dim", None)
    values: dict[str, Any] = _WIDTHS | {
        "num_hidden_layers": count,
        "layer_types": (kinds * count)[:count],
        "hidden_size": -(-64 // heads) * heads if own else 8 * heads,  # heads divide it
        "intermediate_size": as_even(getattr(text, "intermediate_size", None) or 64, 64),
        "n_inner": as_even(getattr(text, "n_inner", None) or 64, 64),
        "vocab_size": 96 + text.vocab_size % 16,
        "max_window_layers": count,
        "first_k_dense_replace": 1,
        "mlp_only_layers": [x for x in getattr(text, "mlp_only_layers", None) or [] if x < count],
        "sliding_window": max(2, length // 2),
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    for key, value in values.items():
        if getattr(text, key, None):
            _set(text, key, value)
    for key, value in vars(text).items():
        if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
            setattr(text, key, 0.0)
    return small


def _set(config: PretrainedConfig, key: str, value: Any) -> None:
    with suppress(AttributeError):  # a property, which follows from the rest
        setattr(config, key, value)


def as_even(number: int, least: int) -> int:
    """The smallest number from `least` on that is divisible by those up to 16 that divide
    `number`."""
    step = gcd(number, _EVEN)
    return -(-least // step) * step
