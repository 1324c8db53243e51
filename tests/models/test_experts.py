"""Fused experts compute in the type that autocast gives other products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from rostra.models.experts import autocast_experts, experts_of
from rostra.models.weights import create_model

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


class Grouped(TorchDispatchMode):
    """The types of what goes into products of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._grouped_mm.default:
            self.types += [x.dtype for x in args[:2]]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_compute_as_autocast_says(family: str) -> None:
    model = create_model(AutoConfig.for_model(family, **SIZES), seed=0)
    autocast_experts(model)
    tokens = torch.arange(32).reshape(2, 16)

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    with Grouped() as whole:
        expected = loss()
        expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with Grouped() as cast:
        with torch.autocast("cpu", torch.bfloat16):
            found = loss()
        found.backward()
    assert set(whole.types) == {torch.float32}
    assert set(cast.types) == {torch.bfloat16}
    assert len(cast.types) == 12  # two products forward and four backward, of two tensors
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        wanted = gradients[name]
        assert wanted is not None
        assert (parameter.grad - wanted).norm() <= 0.05 * wanted.norm() + 1e-4, name


def test_routed_experts_are_found_under_any_name() -> None:
    counts = {
        "llama": (0, 0), "mixtral": (8, 2), "qwen3_moe": (128, 8), "gpt_oss": (128, 4),
        "deepseek_v3": (256, 8),
    }  # fmt: skip
    assert {name: experts_of(AutoConfig.for_model(name)) for name in counts} == counts
