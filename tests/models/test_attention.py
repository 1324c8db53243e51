from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from rostra.errors import RequestError
from rostra.models.attention import NAME, blocked_attention, choose, register

FAMILIES = ["llama", "qwen3", "mistral", "gemma3_text", "gpt2"]
LENGTH = 300  # three blocks, the last one smaller


def model_of(family: str, attention: str = NAME) -> PreTrainedModel:
    """A small random model; windows shorter than a sample where the family has them."""
    register()
    if family == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    else:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": LENGTH,
        }
    if family in {"mistral", "gemma3_text"}:
        sizes["sliding_window"] = 50
    if family == "gemma3_text":
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(family, **{"vocab_size": 99, "initializer_range": 0.1, **sizes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def tokens(samples: int, length: int) -> Tensor:
    return torch.randint(0, 99, (samples, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    found: Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    return found


def inputs(key_heads: int, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(2, heads, length, 16, generator=generator).requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float | None = None) -> Tensor:
    """Attention by its definition: [batch, queries, heads, size]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * 0.25
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def assert_same(found: Tensor, expected: Tensor, of: list[Tensor], tolerance: float) -> None:
    """Values and gradients equal, relative to the largest, or to 1."""
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, of, weights),
        torch.autograd.grad(expected, of, weights),
        strict=True,
    )
    for ours, theirs in pairs:
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)


def triangle(length: int = LENGTH, window: int | None = None) -> Tensor:
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return mask if window is None else mask.triu(1 - window)


@pytest.mark.parametrize("length", [1, 100, 128, 300])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 50, 150])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_equals_the_definition(
    length: int, key_heads: int, window: int | None, softcap: float | None
) -> None:
    q, k, v = inputs(key_heads, length)
    found, _ = blocked_attention(
        SimpleNamespace(is_causal=True), q, k, v, None,
        scaling=0.25, sliding_window=window, softcap=softcap,
    )  # fmt: skip
    assert_same(found, plain(q, k, v, triangle(length, window), softcap), [q, k, v], 1e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_bool_mask_by_sample_and_head(heads: int) -> None:
    q, k, v = inputs(2)
    mask = triangle().repeat(2, heads, 1, 1)
    mask[1, -1, 150:, :120] = False
    found, _ = blocked_attention(SimpleNamespace(is_causal=True), q, k, v, mask, scaling=0.25)
    assert_same(found, plain(q, k, v, mask), [q, k, v], 1e-6)


def test_additive_mask_may_reach_beyond_the_triangle() -> None:
    q, k, v = inputs(2)
    seen = triangle() | (torch.arange(LENGTH) < 200)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min).expand(2, 1, -1, -1)
    found, _ = blocked_attention(SimpleNamespace(is_causal=True), q, k, v, added, scaling=0.25)
    assert_same(found, plain(q, k, v, seen), [q, k, v], 1e-6)


def test_without_causality_all_keys_are_seen() -> None:
    q, k, v = inputs(4)
    found, _ = blocked_attention(SimpleNamespace(is_causal=False), q, k, v, None, scaling=0.25)
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    assert_same(found, plain(q, k, v, everything), [q, k, v], 1e-6)


def test_dropout_drops_what_eager_attention_drops() -> None:
    q, k, v = inputs(4)
    torch.manual_seed(5)
    scores = (q @ k.transpose(2, 3) * 0.25).masked_fill(~triangle(), -torch.inf)
    expected = (torch.dropout(scores.softmax(-1), 0.3, train=True) @ v).transpose(1, 2)
    torch.manual_seed(5)
    found, _ = blocked_attention(
        SimpleNamespace(is_causal=True), q, k, v, None, dropout=0.3, scaling=0.25
    )
    assert_same(found, expected, [q, k, v], 1e-6)


def test_a_row_that_sees_nothing_is_finite() -> None:
    q, k, v = inputs(4)
    mask = triangle().repeat(2, 1, 1, 1)
    mask[0, :, :10] = False
    found, _ = blocked_attention(SimpleNamespace(is_causal=True), q, k, v, mask, scaling=0.25)
    gradients = torch.autograd.grad(found.sum(), [q, k, v])
    assert all(x.isfinite().all() for x in (found, *gradients))


def test_autocast_computes_in_bfloat16() -> None:
    q, k, v = inputs(2)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = blocked_attention(SimpleNamespace(is_causal=True), q, k, v, None, scaling=0.25)
    assert found.dtype == torch.bfloat16
    assert_same(found.float(), plain(q, k, v, triangle()), [q, k, v], 3e-2)


def test_compiled_equals_the_definition() -> None:
    q, k, v = inputs(2)
    starts = (torch.arange(LENGTH) // 70 * 70).int().repeat(2, 1)[:, None, :, None]
    compiled = torch.compile(blocked_attention, dynamic=False)
    found, _ = compiled(SimpleNamespace(is_causal=True), q, k, v, starts, scaling=0.25)
    seen = triangle() & (torch.arange(LENGTH) >= starts)
    assert_same(found, plain(q, k, v, seen), [q, k, v], 1e-6)


def test_refuses_sinks() -> None:
    q, k, v = inputs(4)
    with pytest.raises(RequestError, match="eager"):
        blocked_attention(SimpleNamespace(), q, k, v, None, s_aux=torch.zeros(4))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_isolated(family: str) -> None:
    """Logits of documents in one sample are those of each document alone."""
    model = model_of(family)
    lengths = [130, 7, 1, LENGTH - 138]
    ids = tokens(2, LENGTH)
    positions = torch.cat([torch.arange(n) for n in lengths]).repeat(2, 1)
    packed = logits(model, ids, position_ids=positions)
    alone = [logits(model, part) for part in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-5)
    mixed = logits(model, ids)  # the test would see a leak: without positions there is one
    assert (mixed - packed).abs().max() > 1e-3


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_a_model_gives_the_logits_of_eager_attention(family: str) -> None:
    ids = tokens(2, LENGTH)
    padded = torch.ones_like(ids)
    padded[0, -90:] = 0
    for inputs in ({}, {"attention_mask": padded}):
        found, expected = (
            logits(model_of(family, attention), ids, **inputs) for attention in (NAME, "eager")
        )
        seen = inputs.get("attention_mask", torch.ones_like(ids)).bool()
        torch.testing.assert_close(found[seen], expected[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2"])
def test_generation_with_a_cache_equals_eager_attention(family: str) -> None:
    ids = tokens(2, 60)
    found, expected = (
        model_of(family, attention).generate(ids, max_new_tokens=8, do_sample=False)
        for attention in (NAME, "eager")
    )
    assert torch.equal(found, expected)


def test_masks_of_documents_take_no_square() -> None:
    model = model_of("llama")
    positions = torch.cat([torch.arange(100), torch.arange(200)])[None]
    mask = create_causal_mask(
        model.config, torch.zeros(1, LENGTH, 32), None, None, position_ids=positions
    )
    assert mask.shape == (1, 1, LENGTH, 1)
    assert torch.equal(mask.flatten().unique(), torch.tensor([0, 100], dtype=torch.int32))


def test_choice() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose("auto", cpu, 512) == NAME
    assert choose("auto", cpu, 512, compiled=False) == "sdpa"
    assert choose("auto", cpu, 100_000) == "sdpa"
    assert choose("auto", cuda, 512) in {"sdpa", "flash_attention_2"}
    assert choose("blocked", cuda, 512) == NAME
    assert choose("eager", cpu, 512) == "eager"
    with pytest.raises(RequestError, match="flash-attn"):
        choose("flash_attention_2", cpu, 512)
