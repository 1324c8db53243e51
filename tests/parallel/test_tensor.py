from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ranks import Ranks
from rostra.batch import IGNORE, Batch
from rostra.errors import RequestError
from rostra.models import create_model, decoder_layers, model_on_meta
from rostra.optim import chunked_cross_entropy
from rostra.parallel.tensor import check_tensor, split_tensors, vocabulary_shard

VOCABULARY, LENGTH, SAMPLES = 75, 16, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 70},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
        "pad_token_id": 3,
    },
}


def make_config(family: str, **changes: Any) -> PretrainedConfig:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": family == "gemma3_text",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return AutoConfig.for_model(family, **{**values, **FAMILIES.get(family, {}), **changes})


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """Weights that are all random, those of norms and biases too."""
    model = create_model(make_config(family, **changes), seed=1, attention="sdpa")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.train()


def make_batch() -> Batch:
    """Samples of two documents each, whose tokens are of the whole vocabulary."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (2 * SAMPLES, LENGTH + 1), generator=generator)
    ids[:, 2], ids[:, 11] = 3, 70  # the padding tokens of the families
    labels = ids[:, 1:].clone()
    labels[:, -3:] = IGNORE
    positions = torch.arange(LENGTH) % 7
    return Batch(ids[:, :-1].contiguous(), labels, positions.expand(2 * SAMPLES, -1).contiguous())


def sum_loss(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    hidden = model.base_model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    ).last_hidden_state
    assert type(hidden) is Tensor
    assert hidden.shape == (SAMPLES, LENGTH, 32)
    weight, vocabulary = vocabulary_shard(model.get_output_embeddings().weight)
    return chunked_cross_entropy(
        hidden,
        weight,
        batch.labels,
        scale=1 / 64,
        chunk=10,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        vocabulary=vocabulary,
    )


def train(model: nn.Module, batch: Batch, loss: Any = sum_loss) -> list[float]:
    """Two micro batches, whose gradients add up."""
    plain = []
    for part in batch.micro_batches(SAMPLES):
        scaled, total = loss(model, part)
        scaled.backward()
        plain.append(float(total))
    return plain


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, parameter in model.named_parameters():
        found, wanted = whole(parameter.grad), expected[name].grad
        assert (found - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max())), name
        if isinstance(parameter, DTensor):
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements, name


def equals_one_process(family: str, attention: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model, reference = make_model(family), make_model(family)
    model.set_attn_implementation(attention)
    split_tensors(model, mesh)
    batch = make_batch()
    assert train(model, batch) == pytest.approx(train(reference, batch), rel=1e-6)
    assert_same_gradients(model, reference)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is head) == (family == "gemma3_text")
    assert embedding.to_local().untyped_storage().nbytes() < VOCABULARY * 32 * 4  # no view


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_one_process(ranks: Ranks, family: str) -> None:
    ranks.run(2, equals_one_process, family, "eager" if family == "mistral" else "sdpa")


def test_four_ranks_equal_one(ranks: Ranks) -> None:
    ranks.run(4, equals_one_process, "qwen3", "sdpa")


def recomputed_equals_one_process() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model, reference = make_model("gemma3_text"), make_model("gemma3_text")
    split_tensors(model, mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = make_batch()
    assert train(model, batch) == pytest.approx(train(reference, batch), rel=1e-6)
    assert_same_gradients(model, reference)
    with torch.no_grad():
        parts = list(batch.micro_batches(SAMPLES))
        for part in parts:
            expected = float(sum_loss(reference, part)[1])
            assert float(sum_loss(model, part)[1]) == pytest.approx(expected, rel=1e-6)


def test_recomputed_activations(ranks: Ranks) -> None:
    ranks.run(2, recomputed_equals_one_process)


def autocast_is_close() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model, reference = make_model("llama"), make_model("llama")
    split_tensors(model, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = train(model, make_batch()), train(reference, make_batch())
    assert found == pytest.approx(expected, rel=2e-3)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert (whole(ours.grad) - theirs.grad).norm() <= 0.05 * theirs.grad.norm()


def test_autocast(ranks: Ranks) -> None:
    ranks.run(2, autocast_is_close)


def logits_equal(family: str) -> None:
    """The model's own forward pass gives the whole logits, and can be trained through them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model, reference = make_model(family), make_model(family)
    split_tensors(model, mesh)

    def loss(model: PreTrainedModel, part: Batch) -> tuple[Tensor, Tensor]:
        logits = model(part.input_ids, position_ids=part.position_ids, use_cache=False).logits
        assert logits.shape == (SAMPLES, LENGTH, VOCABULARY)
        total = logits.log_softmax(-1).gather(-1, part.labels.clamp(min=0)[..., None]).sum()
        return total / 64, total.detach()

    assert train(model, make_batch(), loss) == pytest.approx(
        train(reference, make_batch(), loss), rel=1e-6
    )
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_whole_logits(ranks: Ranks, family: str) -> None:
    ranks.run(2, logits_equal, family)


class PassThrough(nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def stages_equal_one_process(cut: int) -> None:
    """Two pipeline stages, one after the other; all layers lie in the last with a cut of 0."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    first, second = make_model("llama"), make_model("llama")
    for index in range(2):
        decoder_layers(second if index < cut else first)[index] = PassThrough()
    first.base_model.norm = PassThrough()
    second.base_model.embed_tokens = PassThrough()
    first.lm_head = PassThrough()
    split_tensors(first, mesh, last=False)
    split_tensors(second, mesh, last=True)
    reference, batch = make_model("llama"), next(make_batch().micro_batches(SAMPLES))

    options = {"position_ids": batch.position_ids, "use_cache": False}
    sent = first.base_model(input_ids=batch.input_ids, **options).last_hidden_state
    received = sent.detach().requires_grad_()
    hidden = second.base_model(inputs_embeds=received, **options).last_hidden_state
    weight, vocabulary = vocabulary_shard(second.lm_head.weight)
    loss, _ = chunked_cross_entropy(hidden, weight, batch.labels, vocabulary=vocabulary)
    loss.backward()
    mine = received.grad.clone()
    dist.broadcast(mine, 0)
    assert torch.equal(mine, received.grad)
    sent.backward(received.grad)

    hidden = reference.base_model(input_ids=batch.input_ids, **options).last_hidden_state
    expected, _ = chunked_cross_entropy(hidden, reference.lm_head.weight, batch.labels)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    wanted = dict(reference.named_parameters())
    seen = set()
    for stage in (first, second):
        for name, parameter in stage.named_parameters():
            seen.add(name)
            torch.testing.assert_close(
                whole(parameter.grad), wanted[name].grad, rtol=1e-4, atol=2e-5
            )
    assert seen == set(wanted)


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_pipeline_stages(ranks: Ranks, cut: int) -> None:
    ranks.run(2, stages_equal_one_process, cut)


class Stage(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return sum_loss(self.model, batch)


def sharded_equals_one_process(family: str) -> None:
    """FSDP over tensor ranks; built on the meta device, then filled."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = model_on_meta(make_config(family), "sdpa").train()
    reference = make_model(family)
    split_tensors(model, mesh["tensor"])
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh["shard"])
    stage = fully_shard(Stage(model), mesh=mesh["shard"])
    for module in stage.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    stage.to_empty(device="cpu")
    fill(model, reference)
    batch = make_batch()
    ours = list(batch.micro_batches(SAMPLES))[mesh.get_local_rank("shard")]
    expected = train(reference, batch)
    for _ in range(2):
        scaled, total = stage(ours)
        scaled.backward()
        assert float(total) == pytest.approx(expected[mesh.get_local_rank("shard")], rel=1e-6)
        assert_same_gradients(model, reference)
        model.zero_grad()


@torch.no_grad()
def fill(model: nn.Module, reference: nn.Module) -> None:
    """Each rank's parts of the reference's weights, and its buffers."""
    values = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        source = DTensor.from_local(
            values[name].detach(), parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim
        )
        parameter.copy_(source.redistribute(placements=parameter.placements))
    buffers = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def test_sharded_over_tensor_ranks(ranks: Ranks) -> None:
    """Other families: see `test_layouts.py`."""
    ranks.run(4, sharded_equals_one_process, "gemma3_text")


def compiled_equals_one_process() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model, reference = make_model("qwen3"), make_model("qwen3")
    split_tensors(model, mesh)
    for layer in decoder_layers(model):
        layer.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    batch = make_batch()
    assert train(model, batch) == pytest.approx(train(reference, batch), rel=1e-6)
    assert_same_gradients(model, reference)


def test_compiled_layers(ranks: Ranks) -> None:
    ranks.run(2, compiled_equals_one_process)


# Calls forward and backward: of a layer, in the backward pass also sums of the gradients of two
# norms and of two biases of rows; outside of them, the embedding's sum, and two of the loss for
# each of three chunks with targets.
PER_LAYER = (
    {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 0, "allreduce": 0},
    {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 4},
)
OUTSIDE = (
    {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 0, "all_reduce": 1, "allreduce": 6},
    {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 1},
)


def collectives(layers: int) -> list[dict[str, int]]:
    """Number of calls by kind: forward, backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model = make_model("llama", num_hidden_layers=layers, vocab_size=76)
    split_tensors(model, mesh)
    batch = next(make_batch().micro_batches(SAMPLES))
    with CommDebugMode() as forward:
        loss, _ = sum_loss(model, batch)
    with CommDebugMode() as backward:
        loss.backward()
    return [
        {str(kind).rpartition(".")[2].rstrip("_"): n for kind, n in counts.items() if n}
        for counts in (forward.get_comm_counts(), backward.get_comm_counts())
    ]


def test_collectives_are_what_theory_says(ranks: Ranks) -> None:
    two, three = (ranks.run(2, collectives, layers)[0] for layers in (2, 3))
    for backward, (one, other) in enumerate(zip(two, three, strict=True)):
        layer = {kind: other[kind] - one[kind] for kind in one}
        outside = {kind: one[kind] - 2 * layer[kind] for kind in one}
        assert (layer, outside) == (PER_LAYER[backward], OUTSIDE[backward])


def test_refused_with_what_works() -> None:
    check_tensor(make_config("llama"), 1, 15)
    check_tensor(make_config("llama"), 2, 16)
    with pytest.raises(RequestError, match=r"= 4: .* 2 key/value heads; .* is 2"):
        check_tensor(make_config("llama"), 4, 16)
    with pytest.raises(RequestError, match=r"= 2: .* 15 positions of a sample; .* is 1"):
        check_tensor(make_config("llama"), 2, 15)
    with pytest.raises(RequestError, match=r"= 8: .*columns of the MLP.*; .* is 4"):
        even = make_config(
            "llama", num_attention_heads=8, num_key_value_heads=8, intermediate_size=36
        )
        check_tensor(even, 8, 16)
    with pytest.raises(RequestError, match=r"5 tokens leave a rank without"):
        check_tensor(make_config("llama", vocab_size=5, num_key_value_heads=4), 4, 16)
    for family in ("gpt2", "mixtral", "phi3"):
        with pytest.raises(RequestError, match="cannot be split"):
            check_tensor(AutoConfig.for_model(family), 2, 16)


def unknown_parts() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model = make_model("llama")
    decoder_layers(model)[1].mlp.router = nn.Linear(32, 4)
    with pytest.raises(RequestError) as refused:
        split_tensors(model, mesh)
    return str(refused.value)


def test_unknown_parts_are_refused(ranks: Ranks) -> None:
    message = ranks.run(2, unknown_parts)[0]
    assert "layers.1.mlp.router (Linear)" in message


def placements() -> dict[str, tuple[Any, ...]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model = model_on_meta(make_config("llama"))
    for parameter in model.model.norm.parameters():
        parameter.requires_grad_(False)
    split_tensors(model, mesh)
    assert not model.model.norm.weight.requires_grad
    assert all(p.is_meta for p in model.parameters())
    return {name: p.placements for name, p in model.named_parameters()}


def test_placements(ranks: Ranks) -> None:
    found = ranks.run(2, placements)[0]
    layer = "model.layers.1"
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (Shard(0),)
    assert found[f"{layer}.self_attn.k_proj.weight"] == (Shard(0),)
    assert found[f"{layer}.self_attn.k_proj.bias"] == (Shard(0),)
    assert found[f"{layer}.mlp.down_proj.weight"] == (Shard(1),)
    assert found[f"{layer}.mlp.down_proj.bias"] == (Replicate(),)
    assert found[f"{layer}.input_layernorm.weight"] == (Replicate(),)
