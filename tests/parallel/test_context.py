"""Context parallelism computes what one process computes, with every attention kernel."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ranks import Ranks
from rostra.batch import IGNORE, Batch
from rostra.errors import RequestError
from rostra.models import decoder_layers
from rostra.models.attention import register
from rostra.optim import cross_entropy_sum
from rostra.parallel.context import check_context, split_context

VOCABULARY, LENGTH, SAMPLES = 97, 16, 2
KERNELS = ["eager", "sdpa", "rostra_blocked"]


def config_of(family: str, kv_heads: int = 2, heads: int = 4, dropout: float = 0.0) -> Any:
    if family == "gpt2":
        dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": heads, **dropouts}
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
    if family in {"mistral", "gemma3_text"}:
        sizes["sliding_window"] = 5  # shorter than a sample, longer than a rank's slice of 4
    if family == "gemma3_text":
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
    return AutoConfig.for_model(family, vocab_size=VOCABULARY, initializer_range=0.1, **sizes)


def model_of(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    register()
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def batch_of() -> Batch:
    """Documents that end within slices and at their borders; slices of unequal targets."""
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH + 1))
    labels = tokens[:, 1:].clone()
    labels[0, :6] = IGNORE
    positions = torch.arange(LENGTH).repeat(SAMPLES, 1)
    for row, begins in enumerate([(3, 8), (10,)]):
        for begin in begins:
            positions[row, begin:] = torch.arange(LENGTH - begin)
    return Batch(tokens[:, :-1].contiguous(), labels, positions)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def alone(config: PretrainedConfig, batch: Batch, isolate: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process with transformers' own eager attention."""
    model = model_of(config, "eager")
    positions = {"position_ids": batch.position_ids} if isolate else {}
    logits = model(input_ids=batch.input_ids, use_cache=False, **positions).logits
    loss = cross_entropy_sum(logits, batch.labels) / batch.targets
    loss.backward()
    return loss.item(), gradients(model)


def split(
    model: PreTrainedModel, batch: Batch, isolate: bool, autocast: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """The same by all ranks together; the model may have been wrapped before."""
    ulysses = split_context(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(**ulysses.inputs(batch, isolate)).logits
    loss = cross_entropy_sum(logits, ulysses.part(batch.labels)) / batch.targets
    loss.backward()
    total = loss.detach().clone()
    for tensor in [total, *(p.grad for p in model.parameters() if p.grad is not None)]:
        dist.all_reduce(tensor)
    return total.item(), gradients(model)


def assert_same(
    found: tuple[float, dict[str, Tensor]],
    expected: tuple[float, dict[str, Tensor]],
    tolerance: float = 1e-5,
) -> None:
    assert found[0] == pytest.approx(expected[0], abs=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m
        )


def agrees(config: PretrainedConfig, kernel: str, isolate: bool) -> None:
    torch.manual_seed(7)
    batch = batch_of()
    names = [name for name, _ in model_of(config, kernel).named_parameters()]
    model = model_of(config, kernel)
    assert_same(split(model, batch, isolate), alone(config, batch, isolate))
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("size", "family"),
    [(2, name) for name in ("llama", "qwen3", "mistral", "gemma3_text", "gpt2")]
    + [(4, name) for name in ("llama", "gemma3_text")],
)
def test_equals_one_process(
    ranks: Ranks, size: int, family: str, kernel: str, isolate: bool
) -> None:
    ranks.run(size, agrees, config_of(family), kernel, isolate)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"), [(2, 4, 1), (4, 8, 1), (2, 6, 3), (4, 8, 4)]
)
def test_heads_of_keys_need_not_be_divisible(
    ranks: Ranks, size: int, heads: int, kv_heads: int, kernel: str
) -> None:
    ranks.run(size, agrees, config_of("llama", kv_heads, heads), kernel, True)


def under_checkpointing() -> None:
    config, batch = config_of("gemma3_text"), batch_of()
    model = model_of(config, "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(split(model, batch, True), alone(config, batch, True))


def test_layers_may_be_checkpointed(ranks: Ranks) -> None:
    ranks.run(2, under_checkpointing)


def under_tensor_parallelism(kernel: str) -> None:
    """Heads split by two tensor ranks, what each has of them by two context ranks."""
    config, batch = config_of("llama", heads=8), batch_of()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    model = model_of(config, kernel)
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
    assert_same((total.item(), found), alone(config, batch, True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_may_be_split_by_tensor_ranks_before(ranks: Ranks, kernel: str) -> None:
    ranks.run(4, under_tensor_parallelism, kernel)


def under_autocast(kernel: str) -> None:
    config, batch = config_of("llama"), batch_of()
    with CommDebugMode() as traffic:
        found = split(model_of(config, kernel), batch, True, autocast=True)
    assert traffic.get_total_counts() > 0
    assert_same(found, alone(config, batch, True), tolerance=0.05)


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_is_near(ranks: Ranks, kernel: str) -> None:
    ranks.run(2, under_autocast, kernel)


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


def dropping(kernel: str) -> None:
    config, batch = config_of("llama", dropout=0.5), batch_of()
    model = model_of(config, kernel)
    ulysses = split_context(model, dist.group.WORLD)
    inputs = ulysses.inputs(batch, True)
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_drops_in_training_alone(ranks: Ranks, kernel: str) -> None:
    ranks.run(2, dropping, kernel)


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
    borders = [0, 3, 8, 16, 26, 32]
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
                "max_length_q": 10,
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


def refused(family: str) -> None:
    config = AutoConfig.for_model(family, vocab_size=9, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(RequestError, match=r"parallel\.context = 2"):
        split_context(model_of(config, "eager"), dist.group.WORLD)


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_refuses_models_of_other_attention(ranks: Ranks, family: str) -> None:
    ranks.run(2, refused, family)
