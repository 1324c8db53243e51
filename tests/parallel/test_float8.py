"""Float8 products, emulated on the CPU: near bfloat16's, in the layers alone."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from rostra.config.schema import ModelSection, OptimizerSection
from rostra.errors import RequestError
from rostra.models import create_model, scratch_config
from rostra.optim import make_optimizers
from rostra.parallel.float8 import check_float8, to_float8

VOCABULARY, LENGTH = 96, 20


def model_of(architecture: str = "llama", intermediate: int = 64) -> PreTrainedModel:
    size = {"hidden_size": 32, "layers": 2, "heads": 4, "intermediate_size": intermediate}
    section = ModelSection.model_validate({"architecture": architecture, "size": size})
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return create_model(scratch_config(section, VOCABULARY, LENGTH, special), 1)


def loss_of(model: PreTrainedModel, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCABULARY, (3, 1), generator=generator)
    tokens = (start + 7 * torch.arange(LENGTH)) % VOCABULARY  # something to learn
    tokens = tokens.to(model.device)
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    loss: Tensor = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return loss


def train(model: PreTrainedModel, steps: int, bf16: bool) -> list[float]:
    section = OptimizerSection(learning_rate=5e-3)
    optimizers = make_optimizers(section, list(model.named_parameters()), set())
    losses = []
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(model, step)
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bf16", [False, True])
def test_the_loss_falls_as_in_bf16(bf16: bool) -> None:
    """Within 0.3 of losses that fall from 4.6 to below 2: e4m3 keeps 4 significant bits."""
    plain, small = model_of(), model_of()
    to_float8(small, emulate=True)
    expected, found = train(plain, 30, True), train(small, 30, bf16)
    assert expected[-1] < 2
    assert found == pytest.approx(expected, abs=0.3)
    assert found != expected


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_parameters_stay_and_only_layers_change(architecture: str) -> None:
    model = model_of(architecture)
    before = list(model.named_parameters())
    changed = to_float8(model, emulate=True)
    after = list(model.named_parameters())
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(p is q for (_, p), (_, q) in zip(before, after, strict=True))
    assert len(changed) == 2 * 7
    assert type(model.get_output_embeddings()) is torch.nn.Linear


def test_sizes_that_do_not_fit_are_left_alone() -> None:
    names = {name.rpartition(".")[2] for name in to_float8(model_of("llama", 72), emulate=True)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_sizes_of_a_tensor_rank_count() -> None:
    """Of 48 columns two ranks have 24 each; queries and what reads them are 2 x 16 still."""
    names = {name.rpartition(".")[2] for name in to_float8(model_of("llama", 48), 2, emulate=True)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(to_float8(model_of("llama", 48), emulate=True)) == 14


def test_a_model_without_data_is_changed_as_well() -> None:
    plain = model_of()
    with torch.device("meta"):
        model = type(plain)(plain.config)
    assert len(to_float8(model, emulate=True)) == 14
    assert all(p.is_meta for p in model.parameters())


def test_a_model_that_has_no_linear_layers_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no linear layer of this GPT2LMHeadModel"):
        to_float8(model_of("gpt2"), emulate=True)


def test_a_device_without_float8_is_refused() -> None:
    with pytest.raises(RequestError, match=r"fp8: this device has no float8 .*cpu.*; use bf16"):
        check_float8(torch.device("cpu"))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(RequestError, match=r'torchao.*pip install "rostra\[lowbit\]"'):
        to_float8(model_of(), emulate=True)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device with float8",
)
def test_the_device_computes_what_emulation_does() -> None:
    device = torch.device("cuda")
    check_float8(device)
    one, two = model_of().to(device), model_of().to(device)
    to_float8(one)
    to_float8(two, emulate=True)
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = loss_of(one, 0), loss_of(two, 0)
    assert found.item() == pytest.approx(expected.item(), rel=1e-2)
    found.backward()
