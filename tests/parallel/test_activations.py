"""Activation checkpointing: less memory, the same loss and gradients to the bit."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ranks import Ranks
from rostra.errors import RequestError, TrainingFailed
from rostra.memory import measure
from rostra.models import decoder_layers
from rostra.models.attention import NAME, register
from rostra.parallel import activation_offload
from rostra.parallel.activations import checkpoint_activations
from rostra.parallel.recompute_once import recompute_once

FAMILIES = ["llama", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]
MODES = [
    "full",
    "every:2",
    "selective:attention",
    "selective:mlp",
    "selective:operations",
    "offload",
    "full in parts",
    "selective:mlp in parts",
]
LAYERS, SAMPLES, LENGTH, VOCABULARY = 4, 4, 32, 97
Step = tuple[float, dict[str, Tensor], int]  # loss, gradients, bytes of activations at the peak


def model_of(family: str, attention: str = "sdpa", mode: str = "none") -> PreTrainedModel:
    """A small model in training; GPT-2 with dropout, Gemma 3 with tied embeddings."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": LENGTH}
    elif family == "opt":
        sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 32}
    elif family == "gemma3_text":
        sizes |= {"head_dim": 8, "sliding_window": 9}
    elif family == "mixtral":
        sizes |= {"num_local_experts": 4}
    elif family == "qwen3_moe":
        sizes |= {"head_dim": 8, "moe_intermediate_size": 32}
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **sizes, **special)
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    checkpoint_activations(model, mode.removesuffix(" in parts"), mode.endswith(" in parts"))
    return model


def backward(model: PreTrainedModel, micro_batches: int = 1, bf16: bool = False) -> float:
    """The loss of the same micro batches, with the same dropout, at every call."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for _ in range(micro_batches):
        ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids.to(device), use_cache=False).logits
        total = logits.float().logsumexp(-1).sum()
        total.backward()
        loss += float(total.detach())
    return loss


def step(model: PreTrainedModel, micro_batches: int = 1, bf16: bool = False) -> Step:
    with measure(model) as memory:
        loss = backward(model, micro_batches, bf16)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss, gradients, memory.bytes["activations"]


def whole(model: PreTrainedModel) -> dict[str, Tensor]:
    """The loss, as "", and the gradients, put together from all ranks."""
    found = {"": torch.tensor(backward(model))}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


@functools.cache
def plain(family: str, attention: str = "sdpa", micro_batches: int = 1, bf16: bool = False) -> Step:
    return step(model_of(family, attention), micro_batches, bf16)


def assert_same(found: Step, expected: Step) -> None:
    assert found[0] == expected[0]
    assert list(found[1]) == list(expected[1])
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_same_and_memory_is_less(family: str, mode: str) -> None:
    found = step(model_of(family, mode=mode))
    assert_same(found, plain(family))
    assert found[2] < 0.95 * plain(family)[2]


@pytest.mark.parametrize("mode", MODES)
def test_with_blocked_attention_accumulation_and_bfloat16(mode: str) -> None:
    found = step(model_of("llama", NAME, mode), micro_batches=2, bf16=True)
    assert_same(found, plain("llama", NAME, 2, True))


def test_the_more_is_computed_again_the_less_is_kept() -> None:
    by_mode = {mode: step(model_of("llama", mode=mode))[2] for mode in MODES}
    none = plain("llama")[2]
    for part in ("selective:mlp", "selective:operations", "every:2"):
        assert by_mode["full"] < by_mode[part] < none
    assert by_mode["full"] < 0.45 * none
    assert by_mode["selective:operations"] < 0.75 * none
    assert by_mode["offload"] < 0.35 * none


@pytest.mark.parametrize("mode", ["full in parts", "selective:mlp in parts"])
def test_a_backward_pass_in_parts_computes_again_once(mode: str) -> None:
    """Zero bubble's: first for what came in, then for the weights, group by group."""
    model, ids = model_of("llama", mode=mode), torch.arange(LENGTH)[None]
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for layer in decoder_layers(model):
        layer.mlp.gate_proj.register_forward_hook(count)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    weights = list(model.model.layers.parameters())

    def total() -> Tensor:
        logits: Tensor = model(inputs_embeds=embedded, use_cache=False).logits
        return logits.float().logsumexp(-1).sum()

    expected = torch.autograd.grad(total(), [embedded, *weights])
    calls = 0
    loss = total()
    into, groups = stage_backward_input([loss], None, [embedded], iter(weights))
    stage_backward_weight(iter(weights), groups)  # into `grad`
    assert len(groups) > LAYERS
    assert calls == 2 * LAYERS
    for one, other in zip((*into, *(w.grad for w in weights)), expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("second", "message"), [(3, "fewer tensors"), (5, "in the place of")])
def test_a_layer_that_computes_something_else_is_noticed(second: int, message: str) -> None:
    """Of the same number of tensors, or of fewer."""
    sizes = iter([4, second])

    def run(x: Tensor) -> Tensor:
        size = next(sizes)
        total = x[: max(4, size)].exp().sum()
        return total + (0 if size == 3 else x[:size].sin().sum())

    total = recompute_once(run, torch.randn(8, requires_grad=True))
    with pytest.raises(RuntimeError, match=message):
        total.backward()


def test_every_layer_of_one_is_full() -> None:
    assert step(model_of("llama", mode="every:1"))[2] == step(model_of("llama", mode="full"))[2]


@pytest.mark.parametrize("mode", MODES)
def test_a_deep_copy_computes_with_its_own_parameters(mode: str) -> None:
    model = model_of("llama", mode=mode)
    names = [name for name, _ in model_of("llama").named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(step(copied), plain("llama"))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["full", "selective:attention", "selective:operations", "offload"])
def test_compiled_layers_share_one_graph(mode: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model_of("llama", NAME, mode)
    for layer in decoder_layers(model):
        layer.compile(dynamic=False, backend="aot_eager_decomp_partition")
    step(model)
    loss, gradients, kept = step(model)
    expected = plain("llama", NAME)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5)
    assert kept < 0.95 * expected[2]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_layers_of_other_stages_are_passed_over() -> None:
    class Elsewhere(nn.Module):
        def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            return hidden

    found = []
    for mode in ("none", "selective:mlp", "offload"):
        model = model_of("llama")
        decoder_layers(model)[0] = Elsewhere()
        checkpoint_activations(model, mode)
        found.append(step(model))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("mode", MODES)
def test_weights_may_come_later(mode: str) -> None:
    with torch.device("meta"):
        model = model_of("llama", mode=mode)
    model.to_empty(device="cpu")
    model.load_state_dict(model_of("llama").state_dict())
    for part in model.modules():
        if hasattr(part, "inv_freq"):  # a buffer that is not saved
            part.__init__(model.config)
    assert_same(step(model), plain("llama"))


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_nothing_is_kept(mode: str) -> None:
    ids = torch.arange(LENGTH)[None]
    with torch.no_grad():
        expected = model_of("llama").eval()(input_ids=ids, use_cache=False).logits
        found = model_of("llama", mode=mode).eval()(input_ids=ids, use_cache=False).logits
    assert torch.equal(found, expected)


def test_a_part_that_the_layers_have_not_is_refused() -> None:
    with pytest.raises(RequestError, match=r"OPTDecoderLayer has no mlp .*fc1, fc2.*; use"):
        model_of("opt", mode="selective:mlp")
    checkpoint_activations(model_of("opt"), "selective:attention")


def test_a_full_disk_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    full = functools.partial(open, "/dev/full", "wb", buffering=0)
    monkeypatch.setattr(activation_offload.tempfile, "TemporaryFile", full)
    with pytest.raises(TrainingFailed, match="No space left on device; set TMPDIR"):
        step(model_of("llama", mode="offload"))


def test_one_file_serves_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emptied when a step begins, and no shorter than what its layers save."""
    made: list[Any] = []
    plain = activation_offload.tempfile.TemporaryFile

    def counted() -> Any:
        made.append(plain())
        return made[-1]

    monkeypatch.setattr(activation_offload.tempfile, "TemporaryFile", counted)
    model, sizes = model_of("llama", mode="offload"), []
    for _ in range(3):
        backward(model)
        sizes.append(made[0].seek(0, 2))
    assert len(made) == 1
    assert len(set(sizes)) == 1
    assert sizes[0] > 0


def _sharded(mode: str) -> dict[str, Tensor]:
    model = model_of("llama", mode=mode)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return whole(model)


def _tensor_parallel(mode: str) -> dict[str, Tensor]:
    model = model_of("llama", mode=mode)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"mlp.gate_proj": ColwiseParallel(use_local_output=False)}
    plan |= {"mlp.up_proj": ColwiseParallel(use_local_output=False)}
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh, {**plan, "mlp.down_proj": RowwiseParallel()})
    return whole(model)


@pytest.mark.parametrize("mode", ["full", "selective:operations", "offload"])
@pytest.mark.parametrize("task", [_sharded, _tensor_parallel])
def test_on_two_ranks(ranks: Ranks, task: Any, mode: str) -> None:
    expected, found = ranks.run(2, task, "none")[0], ranks.run(2, task, mode)[0]
    assert list(found) == list(expected) == ["", *plain("llama")[1]]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for name, gradient in plain("llama")[1].items():  # all ranks have the same samples
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("mode", MODES)
def test_on_cuda(mode: str) -> None:
    expected = step(model_of("gpt2").cuda(), micro_batches=2)
    found = step(model_of("gpt2", mode=mode).cuda(), micro_batches=2)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-4, rtol=1e-4)
    assert found[2] < expected[2]
