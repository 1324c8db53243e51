"""The sizes of a model are those of its modules."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from transformers import AutoConfig

from rostra.errors import RequestError
from rostra.models import find_shape
from rostra.models.weights import model_on_meta
from rostra.parallel.pipeline_split import balance, layer_costs
from rostra.plan.job import sizes_of

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "phi3": {"pad_token_id": 0},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 32},
}
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 160,
}


@pytest.mark.parametrize("family", SHAPES)
def test_all_parameters_are_found(family: str) -> None:
    common = {} if family == "gpt2" else COMMON
    shape = AutoConfig.for_model(family, vocab_size=500, **common, **SHAPES[family])
    sizes, model = sizes_of(shape), model_on_meta(shape)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.depth == 3
    assert (sizes.hidden, sizes.heads, sizes.vocabulary) == (64, 4, 500)
    linears = [linear for layer, _ in sizes.layers for linear in layer.linears]
    assert all(x.cut != "whole" for x in linears) == sizes.splits


def test_a_model_without_attention_cannot_be_planned() -> None:
    shape = AutoConfig.for_model("mamba", num_hidden_layers=2, hidden_size=64)
    with pytest.raises(RequestError, match="mamba has no attention heads"):
        sizes_of(shape)


def test_windows_are_those_of_their_layers() -> None:
    shape = AutoConfig.for_model(
        "gemma3_text", vocab_size=500, head_dim=16, sliding_window=16, num_key_value_heads=1,
        **{**COMMON, "num_hidden_layers": 12},
    )  # fmt: skip
    counts = {layer.window: count for layer, count in sizes_of(shape).layers}
    assert counts == {16: 10, None: 2}


def test_layers_are_cut_as_the_engine_cuts_them() -> None:
    """Of experts those that a token meets count, so that the head weighs more beside a layer."""
    shape = find_shape("Qwen/Qwen3-30B-A3B")
    cuts = sizes_of(shape).cuts(8)
    assert cuts == balance(layer_costs(model_on_meta(shape)), 8)
    assert [b - a for a, b in pairwise(cuts)] == [6, 6, 7, 7, 7, 7, 7, 1]


def test_layers_are_in_their_order() -> None:
    shape = AutoConfig.for_model(
        "deepseek_v3", vocab_size=500, n_routed_experts=8, first_k_dense_replace=2,
        moe_intermediate_size=32, **{**COMMON, "num_hidden_layers": 5},
    )  # fmt: skip
    assert sizes_of(shape).order == (0, 0, 1, 1, 1)
