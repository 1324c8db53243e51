"""LoRA's dropout: how much, keyed by what, and found again by layers that are computed twice."""

from __future__ import annotations

from typing import Any

import torch
from adapters_of_tests import TOKENS, adapted, tiny, trained
from torch import Tensor
from transformers import PreTrainedModel

from rostra.adapt import Keys, key_dropout
from rostra.adapt.dropout import KeyedDropout
from rostra.batch import IGNORE, Batch
from rostra.config.tuning import AdapterTable
from rostra.models import create_model, has_dropout
from rostra.optim import cross_entropy_sum
from rostra.parallel.activations import checkpoint_activations


def batch(ids: Tensor) -> Batch:
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORE)], 1)
    return Batch(ids, labels, positions)


def inputs(batch: Batch) -> tuple[dict[str, Any], Batch]:
    return {"input_ids": batch.input_ids, "use_cache": False}, batch


def model_of(mode: str = "none", step: int = 0) -> tuple[PreTrainedModel, Any]:
    table = AdapterTable(kind="lora", rank=4, dropout=0.3)
    model, _ = adapted(create_model(tiny("llama"), seed=1), table, noise=0.2)
    prepared = key_dropout(model, Keys(5, step), inputs, lambda x: x)
    checkpoint_activations(model, mode)
    return model.train(), prepared


def test_features_are_dropped_at_the_rate_and_each_by_itself() -> None:
    dropout = KeyedDropout(0.25, "a").train()
    tokens = torch.randint(0, 9, (2, 200), generator=torch.Generator().manual_seed(1))
    dropout.keys = Keys(1).positions(tokens)
    ones = torch.ones(2, 200, 48)
    found = dropout(ones)
    torch.testing.assert_close(found.unique(), torch.tensor([0, 1 / 0.75]))
    dropped = (found == 0).double()
    assert abs(dropped.mean() - 0.25) < 0.01
    for dim in (0, 1, 2):  # along samples, positions, features
        assert dropped.mean(dim).var() > 0.5 * 0.25 * 0.75 / ones.shape[dim]
        assert dropped.mean(dim).var() < 1.5 * 0.25 * 0.75 / ones.shape[dim]
    torch.testing.assert_close(dropout(ones.flatten(0, 1)), found.flatten(0, 1))
    other = KeyedDropout(0.25, "b").train()
    other.keys = dropout.keys
    assert 0.55 < (other(ones) == found).double().mean() < 0.7
    assert torch.equal(dropout.eval()(ones), ones)


def test_micro_batches_and_checkpointing_change_nothing() -> None:
    def gradients(mode: str, split: bool, step: int = 0) -> tuple[Tensor, list[Tensor]]:
        model, prepared = model_of(mode, step)
        assert not has_dropout(model)
        losses = []
        for ids in TOKENS.split(1) if split else [TOKENS]:
            arguments, own = prepared(batch(ids))
            losses.append(cross_entropy_sum(model(**arguments).logits, own.labels))
        torch.stack(losses).sum().backward()  # after all forward passes, as in a pipeline
        grads = [p.grad for p in trained(model).values() if p.grad is not None]
        return torch.stack(losses).sum().detach(), grads

    loss, grads = gradients("none", split=False)
    assert len(grads) == 2 * 7 * 2
    for mode in ("none", "full", "selective:operations"):
        torch.testing.assert_close(gradients(mode, split=True), (loss, grads))
    for changed in (gradients("none", split=False, step=1)[0], undropped()):
        assert (changed - loss).abs() > 1e-3


def undropped() -> Tensor:
    model, prepared = model_of()
    arguments, own = prepared(batch(TOKENS))
    torch.testing.assert_close(model.eval()(TOKENS).logits, model(**arguments).logits)
    return cross_entropy_sum(model.eval()(**arguments).logits, own.labels).detach()
