"""Rows of embeddings for added tokens, alone and under an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters_of_tests import TOKENS, filled, saved, state, tiny, trained
from peft import PeftModel

from rostra.adapt import (
    AdaptedWeights,
    GrownWeights,
    adapter_weights,
    add_adapter,
    grow_embeddings,
)
from rostra.config.tuning import AdapterTable
from rostra.errors import RequestError
from rostra.models import create_model, model_on_meta
from rostra.models.weights import real_model
from rostra.pieces import Tensors

ROWS = 70  # of 64


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_are_average_ones_and_are_saved_with_an_adapter(
    tied: bool, tmp_path: Path
) -> None:
    config = tiny("llama", tie_word_embeddings=tied)
    base = create_model(config, seed=1).eval()
    config = tiny("llama", tie_word_embeddings=tied)
    model = model_on_meta(config)
    grown = grow_embeddings(model, ROWS)
    assert grown is not None and "64 to 70" in grown.notice
    assert len(grown.tensors) == (1 if tied else 2)
    reader = GrownWeights(Tensors(state(base)), grown)
    whole = real_model(model.config, reader).eval()
    expected = create_model(tiny("llama", tie_word_embeddings=tied), seed=1).eval()
    old = expected.get_input_embeddings().weight.detach().clone()
    torch.testing.assert_close(whole(TOKENS).logits[..., :64], expected(TOKENS).logits)
    new = whole.get_input_embeddings().weight[64:]
    torch.testing.assert_close(new, old.mean(0).expand(6, -1))
    name = grown.tensors[0]
    rows = reader.read(name, (60, 4), (10, 8))
    torch.testing.assert_close(rows, whole.get_parameter(name)[60:, 4:12])
    flat = reader.read(name, (63 * 32 + 5,), (40,))
    torch.testing.assert_close(flat, whole.get_parameter(name).flatten()[63 * 32 + 5 :][:40])

    adapter = add_adapter(model, AdapterTable(kind="lora", rank=2), grown.modules)
    assert adapter is not None
    first = adapter_weights(model, adapter, 0, reader)
    filled(model, AdaptedWeights(model, reader, first), adapter, noise=0.05)
    assert set(grown.tensors) <= set(trained(model))
    tokens = torch.where(TOKENS == 9, 68, TOKENS)
    folder = saved(model, adapter, tmp_path / "adapter")
    expected.resize_token_embeddings(ROWS)
    found = PeftModel.from_pretrained(expected, folder).eval()
    logits = model(tokens).logits
    torch.testing.assert_close(found(tokens).logits, logits, rtol=1e-5, atol=1e-6)


def test_what_need_not_or_cannot_grow() -> None:
    model = model_on_meta(tiny("llama"))
    assert grow_embeddings(model, 64) is None
    with pytest.raises(RequestError, match="prompt holds no embeddings"):
        add_adapter(model, AdapterTable(kind="prompt"), ("embed_tokens",))
