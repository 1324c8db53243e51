"""Masters on the host: AdamW steps there, and training is what it is without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from rostra.config.schema import OptimizerSection
from rostra.optim import MasterWeights, make_optimizers

HOST = torch.device("cpu")


def model_of(device: torch.device = HOST) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(31, 48), nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 31)
    return nn.Sequential(*layers).to(device)


def train(
    model: nn.Module, master: MasterWeights | None, steps: range, states: Any = "fp32"
) -> tuple[list[float], Any]:
    """Two micro batches a step, and clipping, which reads the gradients."""
    device = next(model.parameters()).device
    named = list(model.named_parameters()) if master is None else master.named
    optimizers = make_optimizers(OptimizerSection(learning_rate=1e-2), named, set(), states)
    losses = []
    for step in steps:
        for half in range(2):
            generator = torch.Generator().manual_seed(2 * step + half)
            tokens = torch.randint(0, 31, (8,), generator=generator).to(device)
            loss: Tensor = nn.functional.cross_entropy(model(tokens).float(), tokens) / 2
            loss.backward()
            losses.append(loss.item())
        if master is not None:
            master.collect()
            assert all(m.grad is not None for _, m in master.named)
        norm = get_total_norm([m.grad for _, m in named if m.grad is not None])
        factor = 1 / max(1.0, float(norm))
        for _, parameter in named:
            assert parameter.grad is not None
            parameter.grad *= factor
        optimizers.step()
        optimizers.zero_grad()
        if master is not None:
            master.publish()
    return losses, optimizers


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_on_one_device_it_is_plain_training_bit_by_bit(states: str) -> None:
    one, two = model_of(), model_of()
    master = MasterWeights(list(two.named_parameters()), None, HOST)
    assert train(one, None, range(5), states)[0] == train(two, master, range(5), states)[0]
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert all(p is m for p, m in master.pairs)  # and takes no memory
    assert master.exact


def test_rounded_weights_may_have_their_masters_on_the_host() -> None:
    one, two = model_of(), model_of()
    near = MasterWeights(list(one.named_parameters()), torch.bfloat16)
    far = MasterWeights(list(two.named_parameters()), torch.bfloat16, HOST)
    assert train(one, near, range(3))[0] == train(two, far, range(3))[0]
    assert not far.exact
    for (_, a), (_, b) in zip(far.named, near.named, strict=True):
        assert torch.equal(a, b)


def test_gradients_that_were_put_there_are_collected() -> None:
    """FSDP2 and buckets give gradients without autograd's hooks."""
    model = model_of()
    master = MasterWeights(list(model.named_parameters()), torch.bfloat16, HOST)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    master.collect()
    assert all(m.grad is not None and bool((m.grad == 1).all()) for _, m in master.named)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_states_live_and_step_on_the_host(dtype: torch.dtype | None) -> None:
    device = torch.device("cuda")
    one, two = model_of(device), model_of(device)
    near = MasterWeights(list(one.named_parameters()), dtype)
    far = MasterWeights(list(two.named_parameters()), dtype, HOST)
    expected, _ = train(one, near, range(10))
    found, optimizers = train(two, far, range(10))
    tolerance = 1e-5 if dtype is None else 2e-2
    assert found == pytest.approx(expected, abs=tolerance)
    assert all(m.device.type == "cpu" and m.is_pinned() for _, m in far.named)
    tensors, _ = optimizers.state()
    assert {t.device.type for t in tensors.values()} == {"cpu"}
    assert all(p.device.type == "cuda" for p in two.parameters())
