"""16-bit copies of parameters that neither autocast nor autograd keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from rostra.memory import measure
from rostra.parallel.recast import cast_at_each_use

WIDTH, BF16 = 256, torch.bfloat16
Autocast = Callable[[str, torch.dtype], AbstractContextManager[Any]]


class Powers(nn.Module):
    """Has a matrix that is not a parameter but made from one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (0.1 * self.weight.exp()).to(BF16).t()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [nn.Linear(WIDTH, WIDTH), Conv1D(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Powers()]
    return nn.Sequential(*inner, *(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def gradients(autocast: Autocast) -> list[Tensor]:
    made = model()
    with autocast("cpu", BF16):
        loss = made(torch.ones(3, WIDTH)).float().square().sum()
    loss.backward()
    return [p.grad for p in made.parameters() if p.grad is not None]


def test_gradients_are_those_of_autocast() -> None:
    usual, again = gradients(torch.autocast), gradients(cast_at_each_use)
    assert len(usual) == len(list(model().parameters()))
    assert all(torch.equal(a, b) for a, b in zip(usual, again, strict=True))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_backward_pass_casts_what_the_parameter_is_then(steps: int) -> None:
    """ZeRO-3 gives back what was gathered, and gathers it anew elsewhere."""
    layer = nn.Linear(WIDTH, WIDTH)
    x = torch.ones(2, WIDTH, requires_grad=True)
    for _ in range(steps):
        with cast_at_each_use("cpu", BF16):
            loss = layer(x).sum()
        whole = layer.weight.data
        layer.weight.data = torch.empty(0)
        layer.weight.data = 2 * whole
        x.grad = None
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad[0], (2 * whole).to(BF16).sum(0).float())


def test_what_was_changed_in_place_is_noticed() -> None:
    x = torch.ones(2, WIDTH, requires_grad=True)
    with cast_at_each_use("cpu", BF16):
        powers = x.exp()  # saved for its own backward pass
        powers.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        powers.sum().backward()


def test_copies_do_not_pile_up() -> None:
    """Of eight square matrices of one size, one copy at most lives at the end of the forward
    pass."""

    def peak(autocast: Autocast) -> int:
        made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
        with measure(made) as memory, autocast("cpu", BF16):
            loss = made(torch.ones(1, WIDTH)).sum()
        del loss
        return memory.bytes["activations"]

    copy = 2 * WIDTH * WIDTH
    assert peak(torch.autocast) > 8 * copy
    assert peak(cast_at_each_use) < 2 * copy


def test_copies_of_experts_do_not_pile_up() -> None:
    """They go into products transposed, as views of three dimensions."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 16)

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([1, 3], dtype=torch.int32)
            matrices = self.weight.to(BF16).transpose(-2, -1)
            return functional.grouped_mm(x.to(BF16), matrices, offs=ends)

    def tried(autocast: Autocast) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        made = nn.Sequential(*(Experts() for _ in range(4)))
        with measure(made) as memory, autocast("cpu", BF16):
            loss = made(torch.ones(3, WIDTH)).float().square().sum()
        loss.backward()
        return memory.bytes["activations"], [
            p.grad for p in made.parameters() if p.grad is not None
        ]

    copy = 2 * 2 * WIDTH * WIDTH
    usual, again = tried(torch.autocast), tried(cast_at_each_use)
    assert usual[0] > 3 * copy  # the first layer hands no gradient on
    assert again[0] < 2 * copy
    assert len(again[1]) == 4
    assert all(torch.equal(a, b) for a, b in zip(usual[1], again[1], strict=True))
