"""Prefixes, noise and dropout where a sample's positions are split over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters_of_tests import adapted, tiny, trained
from torch import Tensor

from ranks import Ranks
from rostra.adapt import Keys, Neftune, attend_to_prefix, key_dropout, virtual_ids
from rostra.batch import IGNORE, Batch
from rostra.config.tuning import AdapterTable
from rostra.models import create_model
from rostra.optim import cross_entropy_sum
from rostra.parallel.context import split_context
from rostra.parallel.ring import split_ring

VIRTUAL = 3
TABLES: dict[str, Any] = {
    "prefix": {"kind": "prefix", "virtual_tokens": VIRTUAL},
    "prompt": {"kind": "prompt", "virtual_tokens": VIRTUAL},
    "lora": {"kind": "lora", "rank": 4, "dropout": 0.2},
}


def packed() -> Batch:
    """Two samples of two examples each, with virtual tokens before each."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for first in (5, 11):
        lengths = (first, 16 - first)
        parts = [torch.randint(1, 60, (n,), generator=generator) for n in lengths]
        for part in parts:
            part[:VIRTUAL] = virtual_ids(VIRTUAL)
        ids = torch.cat(parts)
        labels = torch.where(ids < 0, IGNORE, ids).roll(-1)
        labels[[first - 1, -1]] = IGNORE
        rows.append((ids, labels, torch.cat([torch.arange(n) for n in lengths])))
    return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))


def learn(kind: str, method: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients, summed over the ranks."""
    config = tiny("llama", num_attention_heads=4, num_key_value_heads=2)
    model, _ = adapted(create_model(config, seed=1), AdapterTable(**TABLES[kind]), noise=0.3)
    model.train().set_attn_implementation("sdpa")
    batch = packed()
    if kind == "lora":
        batch = Batch(batch.input_ids.clamp(min=0), batch.labels, batch.position_ids)

    def inputs(batch: Batch) -> tuple[dict[str, Any], Tensor]:
        found = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        if method != "whole":
            found = context.inputs(batch, isolate=True)
        if kind == "prefix":
            attend = {"virtual_ids": part(batch.input_ids)}
            found = {**found, **attend}
        return {**found, "use_cache": False}, part(batch.labels)

    part: Any = lambda x: x  # noqa: E731
    if method != "whole":
        split = split_ring if method == "ring" else split_context
        context = split(model, dist.group.WORLD)
        part = context.part
    if kind == "prefix":
        attend_to_prefix(model)
    keys = Keys(seed=4, step=7)
    prepare = key_dropout(model, keys, Neftune(2.0, keys).attach(model, inputs, part), part)
    arguments, labels = prepare(batch)
    loss = cross_entropy_sum(model(**arguments).logits, labels)
    loss.backward()
    grads = {name: p.grad for name, p in trained(model).items() if p.grad is not None}
    total = loss.detach().clone()
    if method != "whole":
        for tensor in (total, *grads.values()):
            dist.all_reduce(tensor)
    return total, grads


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_split_positions_learn_as_whole_samples(ranks: Ranks, method: str) -> None:
    for kind in TABLES:
        loss, grads = learn(kind, "whole")
        for found, theirs in ranks.run(2, learn, kind, method):
            torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5, msg=kind)
            assert grads.keys() == theirs.keys()
            for name, grad in grads.items():
                near = 1e-4 * float(grad.abs().max())
                torch.testing.assert_close(theirs[name], grad, rtol=0, atol=near)
