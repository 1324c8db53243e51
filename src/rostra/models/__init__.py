"""Causal models of transformers: families and presets, attention, and where the parts are."""

from rostra.models.causal import (
    Head,
    bare_layer,
    decoder_layers,
    evaluating,
    has_dropout,
    head_splits,
    load_model,
    output_head,
    parameter_counts,
    special_tokens,
    split_head,
    takes_positions,
)
from rostra.models.families import FAMILIES, PRESETS, scratch_config
from rostra.models.shapes import find_shape, nearest_shapes, shape_names
from rostra.models.tiny import shrunk, tiny_config
from rostra.models.weights import (
    FolderWeights,
    SeededWeights,
    create_model,
    local_folder,
    model_on_meta,
    pretrained_on_meta,
    pretrained_reader,
)

__all__ = [
    "FAMILIES",
    "PRESETS",
    "FolderWeights",
    "Head",
    "SeededWeights",
    "bare_layer",
    "create_model",
    "decoder_layers",
    "evaluating",
    "find_shape",
    "has_dropout",
    "head_splits",
    "load_model",
    "local_folder",
    "model_on_meta",
    "nearest_shapes",
    "output_head",
    "parameter_counts",
    "pretrained_on_meta",
    "pretrained_reader",
    "scratch_config",
    "shape_names",
    "shrunk",
    "special_tokens",
    "split_head",
    "takes_positions",
    "tiny_config",
]
