"""What tests of split sequences share: tiny models of many attentions, and one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rostra.batch import IGNORE, Batch
from rostra.models.attention import register
from rostra.optim import cross_entropy_sum

VOCABULARY, LENGTH, SAMPLES = 97, 32, 2

Found = tuple[float, dict[str, Tensor]]  # the loss, and gradients by name


def config_of(family: str, heads: int, kv_heads: int, dropout: float = 0.0) -> Any:
    if family == "gpt2":
        dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
        sizes: dict[str, Any] = {"n_embd": 8 * heads, "n_layer": 2, "n_head": heads, **dropouts}
    else:
        sizes = {
            "hidden_size": 8 * heads,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 8,
            "attention_dropout": dropout,
        }
    if family in {"mistral", "gemma2", "gemma3_text"}:
        sizes["sliding_window"] = 7  # across borders; longer than a chunk of 4, not than one of 8
    if family in {"gemma2", "gemma3_text"}:
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
    if family == "gemma2":
        sizes["attn_logit_softcapping"] = 0.5  # low, so that it bends
    return AutoConfig.for_model(family, vocab_size=VOCABULARY, initializer_range=0.1, **sizes)


def model_of(config: PretrainedConfig, attention: str = "eager") -> PreTrainedModel:
    register()
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def batch_of() -> Batch:
    """Documents that end within a rank's share and at its borders; ranks of unequal targets."""
    tokens = torch.randint(
        1, VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(7)
    )
    labels = tokens[:, 1:].clone()
    labels[0, :6] = IGNORE
    positions = torch.arange(LENGTH).repeat(SAMPLES, 1)
    for row, begins in enumerate([(3, 8, 21), (10,)]):
        for begin in begins:
            positions[row, begin:] = torch.arange(LENGTH - begin)
    return Batch(tokens[:, :-1].contiguous(), labels, positions)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def alone(config: PretrainedConfig, batch: Batch, isolate: bool) -> Found:
    """Loss and gradients of one process with transformers' own eager attention."""
    model = model_of(config)
    positions = {"position_ids": batch.position_ids} if isolate else {}
    logits = model(input_ids=batch.input_ids, use_cache=False, **positions).logits
    loss = cross_entropy_sum(logits, batch.labels) / batch.targets
    loss.backward()
    return loss.item(), gradients(model)


def split(
    over_ranks: Callable[..., Any],
    model: PreTrainedModel,
    batch: Batch,
    isolate: bool,
    autocast: bool = False,
) -> Found:
    """The same by all ranks together; `over_ranks(model, mesh)` splits it. The model may have
    been wrapped before."""
    method = over_ranks(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(**method.inputs(batch, isolate)).logits
    loss = cross_entropy_sum(logits, method.part(batch.labels)) / batch.targets
    loss.backward()
    total = loss.detach().clone()
    for tensor in [total, *(p.grad for p in model.parameters() if p.grad is not None)]:
        dist.all_reduce(tensor)
    return total.item(), gradients(model)


def assert_same(found: Found, expected: Found, tolerance: float = 1e-5) -> None:
    assert found[0] == pytest.approx(expected[0], abs=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m
        )
