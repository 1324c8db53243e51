"""The optimizer in the backward pass computes what it computes after, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from rostra.config.schema import ModelSection, OptimizerSection
from rostra.errors import TrainingFailed
from rostra.memory import Memory, measure
from rostra.models import create_model, scratch_config
from rostra.optim import Optimizers, make_optimizers
from rostra.parallel.in_backward import StepInBackward, optimizers_by_parameter

VOCABULARY, LENGTH = 97, 16


def model_of(tied: bool = True) -> PreTrainedModel:
    size = {"hidden_size": 32, "layers": 4, "heads": 4, "intermediate_size": 64}
    section = ModelSection.model_validate(
        {"architecture": "llama", "size": {**size, "tie_embeddings": tied}}
    )
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return create_model(scratch_config(section, VOCABULARY, LENGTH, special), 1)


def parts(model: PreTrainedModel) -> tuple[list[tuple[str, nn.Parameter]], set[str]]:
    named = list(model.named_parameters())
    return named, {name for name, _ in named if "embed" in name or "head" in name}


def loss_of(model: PreTrainedModel, seed: int) -> Tensor:
    tokens = torch.randint(
        0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    logits = model(input_ids=tokens, use_cache=False).logits
    loss: Tensor = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return loss


def step_after(model: PreTrainedModel, optimizers: Optimizers, step: int) -> float:
    optimizers.set_fraction(1 / (step + 1))
    loss_of(model, step).backward()
    norm = float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    optimizers.step()
    optimizers.zero_grad()
    return norm


def step_within(model: PreTrainedModel, within: StepInBackward, step: int) -> float:
    loss = loss_of(model, step)
    with within.updating(1 / (step + 1)):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    within.finish(True)
    return within.gradient_norm()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_weights_norms_and_states_are_those_of_a_step_after(name: str, tied: bool) -> None:
    one, two = model_of(tied), model_of(tied)
    section: Any = OptimizerSection(name=name, learning_rate=1e-3)  # type: ignore[arg-type]
    after = make_optimizers(section, *parts(one))
    within = StepInBackward(optimizers_by_parameter(section, *parts(two)))
    for step in range(5):
        expected, found = step_after(one, after, step), step_within(two, within, step)
        assert found == pytest.approx(expected, rel=1e-5)
    for (key, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), key
    expected_state, found_state = after.state()[0], within.optimizers.state()[0]
    assert expected_state.keys() == found_state.keys()
    for key, value in expected_state.items():
        assert torch.allclose(value, found_state[key], atol=1e-5), key


def test_its_state_goes_into_an_ordinary_optimizer() -> None:
    one, two = model_of(), model_of()
    section = OptimizerSection(learning_rate=1e-3)
    within = StepInBackward(optimizers_by_parameter(section, *parts(one)))
    for step in range(3):
        step_within(one, within, step)
    after = make_optimizers(section, *parts(two))
    two.load_state_dict(one.state_dict())
    after.load_state(*within.optimizers.state())
    step_within(one, within, 3)
    step_after(two, after, 3)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def measured(model: PreTrainedModel, optimizers: Optimizers, step: Any) -> Memory:
    step(0)  # states exist from now on
    with measure(model, *optimizers.parts) as memory:
        step(1)
    return memory


def test_gradients_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens, so that gradients are what the peak is made of."""
    monkeypatch.setitem(globals(), "LENGTH", 2)
    one, two = model_of(), model_of()
    section = OptimizerSection()
    after = make_optimizers(section, *parts(one))
    within = StepInBackward(optimizers_by_parameter(section, *parts(two)))
    plain = measured(one, after, lambda step: step_after(one, after, step))
    small = measured(two, within.optimizers, lambda step: step_within(two, within, step))
    every = sum(p.nbytes for p in one.parameters())
    largest = max(p.nbytes for p in one.parameters())
    assert plain.bytes["gradients"] == every
    assert small.bytes["gradients"] <= 2 * largest
    assert small.bytes["optimizer"] == plain.bytes["optimizer"]
    assert plain.bytes["total"] - small.bytes["total"] > every / 2, (plain, small)


def test_other_backward_passes_change_nothing() -> None:
    model = model_of()
    within = StepInBackward(optimizers_by_parameter(OptimizerSection(), *parts(model)))
    step_within(model, within, 0)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, 1).backward()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_step_that_cannot_be_taken_back_ends_the_run() -> None:
    within = StepInBackward(optimizers_by_parameter(OptimizerSection(), *parts(model_of())))
    with pytest.raises(TrainingFailed, match=r"memory\.optimizer_in_backward has used it already"):
        within.finish(False)
