"""A model of milliseconds of any family, for trying what its code does."""

from __future__ import annotations

import copy

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
            setattr(text, key, value)
    return tiny
