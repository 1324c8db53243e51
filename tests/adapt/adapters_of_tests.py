"""Tiny models with adapters, as they are made everywhere: on the meta device, then filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from rostra.adapt import AdaptedWeights, Adapter, adapter_weights, add_adapter, save_adapter
from rostra.config.tuning import AdapterTable
from rostra.models import model_on_meta, tiny_config
from rostra.pieces import Reader, Tensors, fill

TOKENS = torch.tensor([[5, 9, 2, 11, 7, 3, 30, 8], [1, 6, 33, 4, 12, 50, 22, 60]])


def tiny(family: str, **values: Any) -> Any:
    config = tiny_config(AutoConfig.for_model(family, **values))
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def adapted(
    base: PreTrainedModel, section: AdapterTable, seed: int = 3, noise: float = 0.0, **more: Any
) -> tuple[PreTrainedModel, Adapter]:
    """A copy of `base` with adapters, made on the meta device and filled; `noise` is added to
    what trains, as if it had been."""
    model = model_on_meta(base.config)
    adapter = add_adapter(model, section)
    assert adapter is not None
    reader = Tensors(state(base))
    first = adapter_weights(model, adapter, seed, reader, **more)
    return filled(model, AdaptedWeights(model, reader, first), adapter, noise), adapter


def filled(
    model: PreTrainedModel, weights: Reader, adapter: Adapter, noise: float
) -> PreTrainedModel:
    """`model`, taken off the meta device, with what `weights` has, and noise on what trains."""
    owners = {id(p): name for name, p in model.named_parameters()}
    names = {name: owners[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    model.to_empty(device="cpu")
    for name, owner in names.items():  # tied ones stay one
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(owner))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fill(tensor, weights, name)
            if noise and name in adapter.keys:
                tensor.add_(torch.randn(tensor.shape) * noise)
    return model.eval()


def trained(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def saved(model: PreTrainedModel, adapter: Adapter, folder: Path, base: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_adapter(folder, trained(model), adapter, base)
    return folder
