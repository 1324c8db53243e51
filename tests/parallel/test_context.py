"""Context parallelism computes what one process computes, with every attention kernel."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sequences
import torch
import torch.distributed as dist
from sequences import LENGTH, SAMPLES, Found, alone, assert_same, batch_of, model_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ranks import Ranks
from rostra.batch import Batch
from rostra.errors import RequestError
from rostra.models import decoder_layers
from rostra.optim import cross_entropy_sum
from rostra.parallel.context import check_context, split_context

KERNELS = ["eager", "sdpa", "rostra_blocked"]
split = partial(sequences.split, split_context)


def config_of(family: str, kv_heads: int = 2, heads: int = 4, dropout: float = 0.0) -> Any:
    return sequences.config_of(family, heads, kv_heads, dropout)


def agrees(config: PretrainedConfig) -> None:
    batch = batch_of()
    for isolate in (True, False):
        expected = alone(config, batch, isolate)
        for kernel in KERNELS:
            model = model_of(config, kernel)
            names = [name for name, _ in model.named_parameters()]
            assert_same(split(model, batch, isolate), expected)
            assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize(
    ("size", "family"),
    [(2, name) for name in ("llama", "qwen3", "mistral", "gemma3_text", "gpt2")]
    + [(4, name) for name in ("llama", "gemma3_text")],
)
def test_equals_one_process(ranks: Ranks, size: int, family: str) -> None:
    ranks.run(size, agrees, config_of(family))


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"), [(2, 4, 1), (4, 8, 1), (2, 6, 3), (4, 8, 4)]
)
def test_heads_of_keys_need_not_be_divisible(
    ranks: Ranks, size: int, heads: int, kv_heads: int
) -> None:
    ranks.run(size, agrees, config_of("llama", kv_heads, heads))


def under_checkpointing() -> None:
    config, batch = config_of("gemma3_text"), batch_of()
    model = model_of(config, "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(split(model, batch, True), alone(config, batch, True))


def test_layers_may_be_checkpointed(ranks: Ranks) -> None:
    ranks.run(2, under_checkpointing)


def under_tensor_parallelism() -> None:
    """Heads split by two tensor ranks, what each has of them by two context ranks."""
    config, batch = config_of("llama", heads=8), batch_of()
    expected = alone(config, batch, True)
    for kernel in KERNELS:
        assert_same(over_heads_and_context(model_of(config, kernel), batch), expected)


def over_heads_and_context(model: PreTrainedModel, batch: Batch) -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    for layer in decoder_layers(model):
        plan = {f"self_attn.{x}_proj": ColwiseParallel() for x in "qkv"}
        parallelize_module(layer, mesh["tensor"], {**plan, "self_attn.o_proj": RowwiseParallel()})
    ulysses = split_context(model, mesh["context"])
    logits = model(**ulysses.inputs(batch, True)).logits
    loss = cross_entropy_sum(logits, ulysses.part(batch.labels)) / batch.targets
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(whole, group=mesh["context"].get_group())
        found[name] = whole
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh["context"].get_group())
    return total.item(), found


def test_heads_may_be_split_by_tensor_ranks_before(ranks: Ranks) -> None:
    ranks.run(4, under_tensor_parallelism)


def under_autocast() -> None:
    config, batch = config_of("llama"), batch_of()
    expected = alone(config, batch, True)
    for kernel in KERNELS:
        with CommDebugMode() as traffic:
            found = split(model_of(config, kernel), batch, True, autocast=True)
        assert traffic.get_total_counts() > 0
        assert_same(found, expected, tolerance=0.05)


def test_autocast_is_near(ranks: Ranks) -> None:
    ranks.run(2, under_autocast)


def all_to_alls() -> tuple[int, int]:
    """Number of all-to-alls of two layers: forward, backward."""
    batch = batch_of()
    model = model_of(config_of("llama"), "sdpa")
    ulysses = split_context(model, dist.group.WORLD)
    op = torch.ops.c10d_functional.all_to_all_single
    with CommDebugMode() as forward:
        loss = model(**ulysses.inputs(batch, True)).logits.sum()
    with CommDebugMode() as backward:
        loss.backward()
    assert forward.get_total_counts() == forward.get_comm_counts()[op]
    return forward.get_comm_counts()[op], backward.get_comm_counts()[op]


def test_two_all_to_alls_a_layer_each_way(ranks: Ranks) -> None:
    assert ranks.run(2, all_to_alls) == [(4, 4), (4, 4)]


def compiled(family: str, kernel: str, backend: str) -> None:
    config, batch = config_of(family), batch_of()
    model = model_of(config, kernel)
    for layer in decoder_layers(model):
        layer.compile(dynamic=False, fullgraph=True, backend=backend)
    assert_same(split(model, batch, True), alone(config, batch, True))


@pytest.mark.parametrize(
    ("family", "kernel", "backend"),
    [
        ("llama", "rostra_blocked", "inductor"),
        ("gemma3_text", "sdpa", "aot_eager"),
        ("gpt2", "eager", "aot_eager"),
    ],
)
def test_layers_may_be_compiled(ranks: Ranks, family: str, kernel: str, backend: str) -> None:
    """The exchange is part of a layer's one graph."""
    ranks.run(2, compiled, family, kernel, backend)


def dropping() -> None:
    config, batch = config_of("llama", dropout=0.5), batch_of()
    for kernel in KERNELS:
        model = model_of(config, kernel)
        inputs = split_context(model, dist.group.WORLD).inputs(batch, True)
        assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
        model.eval()
        assert torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_dropout_drops_in_training_alone(ranks: Ranks) -> None:
    ranks.run(2, dropping)


def masks() -> dict[str, Any]:
    """Shapes of masks, and what FlashAttention gets."""
    batch, found = batch_of(), {}
    for kernel in KERNELS:
        for isolate in (True, False):
            ulysses = split_context(model_of(config_of("llama"), kernel), dist.group.WORLD)
            mask = ulysses.inputs(batch, isolate)["attention_mask"]
            found[kernel, isolate] = None if mask is None else tuple(mask.shape)
    config = deepcopy(ulysses.config)
    config._attn_implementation = "flash_attention_2"
    found["flash"] = replace(ulysses, config=config).inputs(batch, True)
    return {name: value for name, value in found.items() if name != "flash"} | {
        "flash": {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in found["flash"].items()
            if name in ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q")
        }
    }


def test_masks_are_no_larger_than_the_kernel_needs(ranks: Ranks) -> None:
    square = (SAMPLES, 1, LENGTH, LENGTH)
    borders = [0, 3, 8, 21, 32, 42, 64]
    for found in ranks.run(2, masks):
        assert found == {
            ("eager", True): square,
            ("eager", False): square,
            ("sdpa", True): square,
            ("sdpa", False): None,
            ("rostra_blocked", True): (SAMPLES, 1, LENGTH, 1),
            ("rostra_blocked", False): None,
            "flash": {
                "attention_mask": None,
                "cu_seq_lens_q": borders,
                "cu_seq_lens_k": borders,
                "max_length_q": 22,
            },
        }


@pytest.mark.parametrize(
    ("config", "size", "length", "tensor", "message"),
    [
        (config_of("llama"), 3, 24, 1, "4 query heads; set parallel.context: 2"),
        (config_of("llama"), 4, 24, 2, "2 query heads of each of 2 tensor ranks; .*context: 2"),
        (config_of("llama"), 4, 26, 1, r"data.sequence_length \(26\); set parallel.context: 2"),
        (config_of("gpt2"), 8, 32, 1, "4 query heads; set parallel.context: 4"),
        (AutoConfig.for_model("rwkv"), 2, 32, 1, "without attention.*; set parallel.context: 1"),
        (AutoConfig.for_model("qwen3_next"), 2, 32, 1, "linear_attention layers"),
        (
            AutoConfig.for_model(
                "llama",
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                max_position_embeddings=16,
            ),
            2,
            32,
            1,
            "beyond 16 positions",
        ),
    ],
)
def test_refuses_what_cannot_be_split(
    config: PretrainedConfig, size: int, length: int, tensor: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check_context(config, size, length, tensor)


def test_takes_what_can_be_split() -> None:
    check_context(config_of("llama", kv_heads=1), 4, 32)
    check_context(config_of("gemma3_text"), 2, 32, tensor=2)
    check_context(AutoConfig.for_model("mamba"), 1, 31)


def refused() -> None:
    for family in ("bloom", "mamba"):
        config = AutoConfig.for_model(family, vocab_size=9, hidden_size=32, num_hidden_layers=1)
        with pytest.raises(RequestError, match=r"parallel\.context = 2"):
            split_context(model_of(config), dist.group.WORLD)


def test_refuses_models_of_other_attention(ranks: Ranks) -> None:
    ranks.run(2, refused)
