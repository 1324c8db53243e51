"""Experts of mixture models: how many a token meets, and in which type they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "rostra_autocast"
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def experts_of(config: PretrainedConfig) -> tuple[int, int]:
    """How many routed experts a layer of this model has, and how many a token is sent to;
    (0, 0) where there are none."""
    text = config.get_text_config()
    count = next((n for key in _COUNTS if (n := getattr(text, key, None))), 0)
    active = getattr(text, "num_experts_per_tok", None) or 0
    return (count, active) if count and active else (0, 0)


def fused_experts(model: nn.Module) -> list[Any]:
    """The modules that hold all experts of a layer in a few tensors [experts, rows, columns]."""
    # what transformers' `use_experts_implementation` gives each of them
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def autocast_experts(model: nn.Module) -> None:
    """Have fused experts compute in autocast's type where that is on, in place.

    Autocast casts for `nn.Linear` and knows nothing of grouped products (pytorch/pytorch#174763):
    these would be of float32 weights, on devices that have them for 16 bits alone.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    for module in fused_experts(model):
        module.config._experts_implementation = NAME


def _experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """As transformers calls it; the result has the type of `hidden_states`."""
    device = hidden_states.device.type
    own: Any = module
    if torch.is_autocast_enabled(device):
        own = _Cast(module, torch.get_autocast_dtype(device))
    out: Tensor = grouped_mm_experts_forward(own, hidden_states, top_k_index, top_k_weights)
    return out


class _Cast:
    """A module whose tensors are read in another type; inputs follow that of the weights."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value
