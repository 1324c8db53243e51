"""What LoRA around a model's head adds to its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def head_update(module: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """The two factors of what the adapters around `module` add to the logits of `hidden`
    [..., size]: u [..., ranks] and B [vocabulary, ranks], for u·Bᵀ, with the ranks of all
    adapters side by side, and a bias of an update as one of them. None for a head without.

    So a loss that makes its logits chunk by chunk can add the update there.
    """
    layer: Any = module
    names = [name for name in getattr(layer, "active_adapters", ()) if name in layer.lora_A]
    if not names:
        return None
    narrow = [
        layer.lora_A[name](layer.lora_dropout[name](hidden)) * layer.scaling[name] for name in names
    ]
    wide = [layer.lora_B[name].weight for name in names]
    for name in names:
        if (bias := layer.lora_B[name].bias) is not None:
            narrow.append(torch.full_like(hidden[..., :1], layer.scaling[name]))
            wide.append(bias[:, None])
    return torch.cat(narrow, -1), torch.cat(wide, 1)
