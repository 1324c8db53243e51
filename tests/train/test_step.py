"""The loss contract: one step is the step of a plain loop, however the batch is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from parallel import common
from parallel.common import CPU, LENGTH, SAMPLES, VOCABULARY, batch_of, config_of
from rostra.batch import IGNORE, Batch
from rostra.build import build_engine
from rostra.events import Events
from rostra.layout import Layout
from rostra.models.attention import choose
from rostra.parallel import TorchEngine
from rostra.train import train_step

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma3", "gpt2"]


def model_of(architecture: str, attention: str | None = None) -> PreTrainedModel:
    return common.model_of(architecture, 2, attention)


def engine_of(
    model: PreTrainedModel, /, micro: int = SAMPLES, compute: Any = "fp32", **sections: Any
) -> TorchEngine:
    layout = Layout(micro, -(-SAMPLES // micro), compute=compute)
    return build_engine(config_of(**sections), layout, model, CPU, 10, Events())


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["eager", "sdpa", "blocked"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_equals_a_plain_transformers_loop(architecture: str, attention: Any) -> None:
    batch = batch_of()
    plain = model_of(architecture, "eager")
    logits = plain(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    ).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    ours = model_of(architecture)
    engine = engine_of(ours, model={"preset": "tiny", "attention": attention})
    assert ours.config._attn_implementation == choose(attention, CPU, LENGTH)
    total, targets = engine.forward_backward(batch)
    assert total / targets == pytest.approx(float(loss), abs=1e-5)
    expected, found = gradients(plain), gradients(ours)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-5), name
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert engine.gradient_norm() == pytest.approx(float(norm), rel=1e-5)


def test_the_weights_after_a_step_are_the_plain_loops() -> None:
    batch = batch_of()
    plain, ours = model_of("llama"), model_of("llama")
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    engine = engine_of(ours, optimizer={"learning_rate": 1e-3}, schedule={"name": "constant"})
    for seed in range(3):
        batch = batch_of(seed)
        logits = plain(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        outcome = train_step(engine, batch)
        assert outcome.loss == pytest.approx(float(loss), abs=1e-5)
        assert outcome.accepted
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_accumulation_changes_nothing(micro: int) -> None:
    """1 × 8, 2 × 4, 8 × 1 and an uneven 3 + 3 + 2, with unequal targets per micro batch."""
    batch = batch_of()
    whole, cut = model_of("llama"), model_of("llama")
    expected = engine_of(whole).forward_backward(batch)
    found = engine_of(cut, micro).forward_backward(batch)
    assert found[1] == expected[1]
    assert found[0] / found[1] == pytest.approx(expected[0] / expected[1], abs=1e-6)
    for name, gradient in gradients(whole).items():
        assert torch.allclose(gradients(cut)[name], gradient, atol=1e-6), name


@pytest.mark.parametrize(
    ("compute", "tolerance"), [("bf16", 0.02), ("fp16", 0.02), ("bf16_pure", 0.03)]
)
def test_half_precision_is_near_and_learns(compute: Any, tolerance: float) -> None:
    exact = engine_of(model_of("llama"), 4).forward_backward(batch_of())
    engine = engine_of(
        model_of("llama"), 4, compute, optimizer={"learning_rate": 1e-2}, schedule={"warmup": 0}
    )
    outcomes = [train_step(engine, batch_of()) for _ in range(8)]
    assert outcomes[0].loss == pytest.approx(exact[0] / exact[1], rel=tolerance)
    assert all(outcome.accepted for outcome in outcomes)
    assert outcomes[-1].loss < outcomes[0].loss - 0.3


def test_a_step_that_is_not_finite_is_passed_over() -> None:
    model = model_of("llama")
    engine = engine_of(model)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    outcome = train_step(engine, batch_of())
    assert not outcome.accepted
    with torch.no_grad():
        model.model.norm.weight[0] = 1.0
    for was, now in zip(before, model.parameters(), strict=True):
        assert torch.equal(was, now)
    assert train_step(engine, batch_of()).accepted


def test_fp16_lowers_its_scale_after_an_overflow() -> None:
    engine = engine_of(model_of("llama"), compute="fp16")
    engine.scale.scale = 2.0**40
    assert not train_step(engine, batch_of()).accepted
    assert engine.scale.scale == 2.0**39


def test_gradients_are_clipped_to_the_norm() -> None:
    ours = model_of("llama")
    engine = engine_of(ours, stability={"clip": 0.01}, optimizer={"name": "sgd", "momentum": 0.0})
    engine.forward_backward(batch_of())
    assert engine.gradient_norm() > 0.01
    grads: list[Tensor] = []
    engine.optimizers.parts[0].register_step_pre_hook(
        lambda *_: grads.extend(p.grad.flatten() for p in ours.parameters() if p.grad is not None)
    )
    engine.step(accept=True)
    assert float(torch.cat(grads).norm()) == pytest.approx(0.01, rel=1e-4)


def test_documents_in_one_sample_do_not_see_each_other() -> None:
    """The loss over two documents in one sample is that of each document alone."""
    model = model_of("llama")
    engine = engine_of(model)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    labels, positions = tokens.roll(-1, 1), torch.arange(LENGTH)[None].clone()
    positions[:, 10:] -= 10
    labels[:, 9], labels[:, -1] = IGNORE, IGNORE
    together = engine.forward(Batch(tokens, labels, positions))
    alone = [
        engine.forward(Batch(tokens[:, part], labels[:, part], positions[:, part]))
        for part in (slice(0, 10), slice(10, LENGTH))
    ]
    assert together[1] == sum(count for _, count in alone)
    assert together[0] == pytest.approx(sum(total for total, _ in alone), rel=1e-6)
