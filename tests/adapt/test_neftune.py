"""NEFTune's noise: its size, what it is keyed by, and where there is none."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from adapters_of_tests import tiny
from torch import Tensor
from transformers import PreTrainedModel

from rostra.adapt import Keys, Neftune, virtual_ids
from rostra.batch import IGNORE, Batch
from rostra.models import create_model

ALPHA, HIDDEN = 5.0, 32


def sample(*lengths: int, virtual: int = 0, first: int = 1) -> Batch:
    ids = [torch.cat([virtual_ids(virtual), torch.arange(first, first + n)]) for n in lengths]
    positions = torch.cat([torch.arange(n + virtual) for n in lengths])[None]
    tokens = torch.cat(ids)[None]
    return Batch(tokens, torch.full_like(tokens, IGNORE), positions)


def whole(batch: Batch) -> tuple[dict[str, Any], Tensor]:
    return {"input_ids": batch.input_ids}, batch.labels


def noise(
    batch: Batch, step: int = 0, seed: int = 1, part: Any = lambda x: x, train: bool = True
) -> Tensor:
    """What is added to the embeddings of the positions that `part` leaves."""
    model: PreTrainedModel = create_model(tiny("llama"), seed=1).train(train)
    embedding = model.get_input_embeddings()
    ids = part(batch.input_ids).clamp(min=0)
    plain = embedding(ids)
    Neftune(ALPHA, Keys(seed, step)).attach(model, whole, part)(batch)
    found: Tensor = embedding(ids) - plain
    assert torch.equal(embedding(ids), plain)  # once for each micro batch
    return found.detach()


def test_noise_is_uniform_and_scaled_by_the_tokens_of_its_example() -> None:
    found = noise(sample(4, 16, virtual=2))[0]
    assert not found[:2].any() and not found[6:8].any()
    for rows, length in ((found[2:6], 4), (found[8:], 16)):
        scaled = rows * (length * HIDDEN) ** 0.5 / ALPHA
        assert 0.9 < scaled.abs().max() <= 1
        assert abs(scaled.mean()) < 0.2 and abs(scaled.var() - 1 / 3) < 0.08
        assert len(scaled.unique()) > 0.95 * scaled.numel()


def test_noise_is_keyed_by_seed_step_and_sample_and_by_nothing_else() -> None:
    one, two = sample(8, 4), sample(8, 4, first=20)
    both = Batch(*(torch.cat(x) for x in zip(*map(columns, (two, one)), strict=True)))
    expected = noise(one)
    torch.testing.assert_close(noise(both)[1:], expected)  # whichever row and rank it is on
    for start in (0, 6):  # and whichever of its positions
        part = partial(torch.narrow, dim=1, start=start, length=6)
        torch.testing.assert_close(noise(one, part=part), expected[:, start : start + 6])
    for other in (noise(one, step=1), noise(one, seed=2), noise(two)):
        assert not (other == expected).any()
    assert not noise(one, train=False).any()


def columns(batch: Batch) -> tuple[Tensor, ...]:
    return tuple(batch.tensors().values())
