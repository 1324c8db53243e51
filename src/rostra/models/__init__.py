"""Causal models of transformers: families and presets, attention, and where the parts are."""

from rostra.models.causal import (
    Head,
    create_model,
    decoder_layers,
    evaluating,
    load_model,
    parameter_counts,
    special_tokens,
    split_head,
    takes_positions,
)
from rostra.models.families import FAMILIES, PRESETS, scratch_config

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Head",
    "create_model",
    "decoder_layers",
    "evaluating",
    "load_model",
    "parameter_counts",
    "scratch_config",
    "special_tokens",
    "split_head",
    "takes_positions",
]
