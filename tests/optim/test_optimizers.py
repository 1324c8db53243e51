from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rostra.config.schema import OptimizerSection
from rostra.optim import LossScale, MasterWeights, Optimizers, make_optimizers

NAMES = ["adamw", "sgd", "adafactor", "lion", "muon"]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
    )


def optimizers_of(model: nn.Module, **section: Any) -> Optimizers:
    named = list(model.named_parameters())
    return make_optimizers(OptimizerSection(**section), named, {"0.weight", "3.weight"})


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return loss


def train(model: nn.Module, optimizers: Optimizers, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_learns(name: str) -> None:
    model = small()
    losses = train(model, optimizers_of(model, name=name, learning_rate=1e-2), range(60))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_state_goes_into_another_optimizer_bit_by_bit(name: str) -> None:
    one, two = small(), small()
    first = optimizers_of(one, name=name)
    train(one, first, range(3))
    two.load_state_dict(one.state_dict())
    second = optimizers_of(two, name=name)
    tensors, values = first.state()
    second.load_state({k: v.clone() for k, v in tensors.items()}, values)
    assert train(one, first, range(3, 6)) == train(two, second, range(3, 6))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_only_matrices_decay(name: str) -> None:
    model = small()
    optimizers = optimizers_of(model, name=name, weight_decay=0.5)
    decays = {
        parameter: group["weight_decay"]
        for part in optimizers.parts
        for group in part.param_groups
        for parameter in group["params"]
    }
    for parameter in model.parameters():
        assert decays[parameter] == (0.5 if parameter.dim() >= 2 else 0.0)


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = small()
    muon, adamw = optimizers_of(model, name="muon").parts
    names = {p: n for n, p in model.named_parameters()}
    assert [names[p] for g in muon.param_groups for p in g["params"]] == ["1.weight"]
    assert {names[p] for g in adamw.param_groups for p in g["params"]} == (
        set(names.values()) - {"1.weight"}
    )


def test_lion_follows_the_papers_rule() -> None:
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    optimizers = make_optimizers(
        OptimizerSection(name="lion", learning_rate=0.1, weight_decay=0.5, beta1=0.9, beta2=0.99),
        [("w", parameter)],
        set(),
    )
    expected, momentum = parameter.detach().clone(), torch.zeros(2, 2)
    for rows in ([[0.3, -0.1], [2.0, 0.1]], [[-1.0, 0.0], [0.0, -0.2]]):
        gradient = torch.tensor(rows)
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        expected -= 0.1 * (update + 0.5 * expected)
        momentum = 0.99 * momentum + 0.01 * gradient
        parameter.grad = gradient.clone()
        optimizers.step()
    assert torch.allclose(parameter, expected, atol=1e-7)


def test_a_fraction_scales_each_groups_own_rate() -> None:
    optimizers = optimizers_of(small(), name="muon", learning_rate=1e-3, matrix_learning_rate=0.02)
    optimizers.set_fraction(0.25)
    rates = [group["lr"] for part in optimizers.parts for group in part.param_groups]
    assert rates == pytest.approx([0.005, 0.00025, 0.00025])


def test_a_loss_scale_halves_on_overflow_and_grows_after_good_steps() -> None:
    scale = LossScale(8.0, growth=3)
    seen = []
    for accepted in [False, True, True, True, False, True]:
        scale.update(accepted)
        seen.append(scale.scale)
    assert seen == [4, 4, 4, 8, 4, 4]
    fixed = LossScale()
    fixed.update(False)
    assert fixed.scale == 1


def test_master_weights_keep_what_sixteen_bits_lose() -> None:
    """Steps of 1e-4 at 1.0 vanish in bfloat16 (spacing 2^-7) unless they add up elsewhere."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    master = MasterWeights(list(model.named_parameters()), torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16
    section = OptimizerSection(name="sgd", learning_rate=1e-4, weight_decay=0, momentum=0)
    optimizers = make_optimizers(section, master.named, set())
    for _ in range(200):
        for _ in range(2):  # two micro batches, accumulated in float32
            (model(torch.ones(1, 1, dtype=torch.bfloat16)) / 2).sum().backward()
        assert model.weight.grad is None
        optimizers.step()
        optimizers.zero_grad()
        master.publish()
    assert float(master.pairs[0][1]) == pytest.approx(1 - 200e-4, abs=1e-5)
    assert float(model.weight) == pytest.approx(0.98, abs=2**-8)
