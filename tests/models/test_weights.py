"""Weights from a seed and from a folder: part by part, and the same as all at once."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ranks import Ranks
from rostra.errors import RequestError
from rostra.models import (
    FolderWeights,
    SeededWeights,
    create_model,
    decoder_layers,
    load_model,
    model_on_meta,
    pretrained_on_meta,
    pretrained_reader,
)
from rostra.models.weights import initial_buffers
from rostra.pieces import Reader, fill

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "vocab_size": 101,
    "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "pad_token_id": 3,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 101}
FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe", "gpt_oss"]


def shape_of(family: str, **values: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **(GPT2 if family == "gpt2" else SIZES), **values)


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def filled(config: PretrainedConfig, reader: Reader) -> PreTrainedModel:
    """As a rank fills what it holds: from meta, by name, in the reverse order."""
    model = model_on_meta(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, tensor in reversed(tensors(model).items()):
        fill(tensor, reader, name)
    return model.eval()


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(1, 9)[None], use_cache=False).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_are_distributed_as_transformers_makes_them(
    family: str, tied: bool
) -> None:
    config = shape_of(family, tie_word_embeddings=tied)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours = create_model(config, seed=0)
    assert list(tensors(ours)) == list(tensors(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    buffers = dict(ours.named_buffers())
    for name, parameter in tensors(theirs).items():
        value = parameter.detach()
        mine = tensors(ours)[name].detach()
        assert (mine.shape, mine.dtype) == (value.shape, value.dtype)
        spread = float(value.std()) if value.numel() > 1 else 0.0
        if name in buffers or spread == 0:
            assert torch.equal(mine, value), name
            continue
        chance = value.numel() ** -0.5  # how far two samples of it are apart
        assert float(mine.std()) == pytest.approx(spread, rel=6 * chance), name
        assert torch.equal((mine == 0).all(-1), (value == 0).all(-1)), name  # padding
        assert abs(float(mine.mean())) < 5 * chance * spread


def test_the_residual_projections_of_gpt2_are_scaled_by_depth() -> None:
    model = create_model(AutoConfig.for_model("gpt2", **{**GPT2, "n_embd": 128}), seed=0)
    layer = model.transformer.h[1]
    assert float(layer.attn.c_proj.weight.detach().std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert float(layer.mlp.c_fc.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_comes_from_the_seed_and_its_name_alone(family: str) -> None:
    config = shape_of(family)
    whole = tensors(create_model(config, seed=7))
    before = torch.get_rng_state()
    reader = SeededWeights(config, 7)
    assert set(reader.names()) == set(whole)
    for name in sorted(whole, key=lambda x: x[::-1]):
        value, alone = whole[name].detach(), SeededWeights(config, 7)
        shape = tuple(value.shape)
        zero, flat = (0,) * len(shape), value.flatten()
        assert reader.shape(name) == shape
        assert torch.equal(alone.read(name, zero, shape), value)
        assert torch.equal(reader.read(name, (1,), (flat.numel() - 1,)), flat[1:])
        if len(shape) > 1:
            size = (shape[0] - 1, *shape[1:-1], 2)
            part = reader.read(name, (1, *zero[1:]), size)
            assert torch.equal(part, value[1:, ..., :2])
    assert torch.equal(before, torch.get_rng_state())
    other = tensors(create_model(config, seed=8))
    changed = [not torch.equal(other[name], value) for name, value in whole.items()]
    assert any(changed)


def test_layers_and_seeds_differ() -> None:
    model = create_model(shape_of("llama"), seed=0)
    one, two = (model.model.layers[i].mlp.up_proj.weight for i in (0, 1))
    assert not torch.equal(one, two)


def test_a_model_from_meta_computes_what_the_whole_one_does() -> None:
    for family in ("gemma3_text", "gpt2", "qwen3_moe"):
        config = shape_of(family)
        meta = filled(config, SeededWeights(config, 3))
        assert torch.equal(logits(meta), logits(create_model(config, 3)))


def test_an_initialisation_that_leaves_something_out_is_refused() -> None:
    config = shape_of("llama")
    reader = SeededWeights(config, 0)
    layer = reader._unit["model.layers.1.mlp.up_proj.weight"].module
    layer.extra = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(RequestError, match=r"LlamaModel: .*model\.layers\.1\.extra"):
        reader.read("model.layers.1.mlp.up_proj.weight", (0, 0), (1, 1))


def task_sharded(family: str, folder: str) -> Tensor:
    """Layer by layer over the ranks, from meta; no rank ever has the whole model."""
    config = shape_of(family) if not folder else AutoConfig.from_pretrained(folder)
    reader: Reader = FolderWeights(Path(folder), config) if folder else SeededWeights(config, 1)
    model = model_on_meta(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.tie_weights()
    held = tensors(model)
    for name, tensor in held.items():
        fill(tensor, reader, name)
    assert list(held) == list(tensors(model_on_meta(config)))
    return logits(model)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_ranks_fill_their_parts_of_one_model(family: str, ranks: Ranks, tmp_path: Path) -> None:
    expected = logits(save(shape_of(family), tmp_path))
    for folder in ("", str(tmp_path)) if family != "mixtral" else ("",):
        for found in ranks.run(2, task_sharded, family, folder):
            assert torch.allclose(found, expected, atol=1e-6)


def save(config: PretrainedConfig, folder: Path, **options: Any) -> PreTrainedModel:
    model = create_model(config, seed=1)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_read_under_the_models_names(family: str, tied: bool, tmp_path: Path) -> None:
    model = save(shape_of(family, tie_word_embeddings=tied), tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = AutoConfig.from_pretrained(tmp_path)
    reader = FolderWeights(tmp_path, config)
    assert set(reader.names()) == set(tensors(model))
    for name, value in tensors(model).items():
        assert reader.shape(name) == tuple(value.shape)
    assert torch.equal(logits(filled(config, reader)), logits(model))


def test_a_folder_of_the_base_model_or_of_the_tied_head_alone_is_understood(
    tmp_path: Path,
) -> None:
    model = save(shape_of("llama", tie_word_embeddings=True), tmp_path / "head")
    stored = load_file(tmp_path / "head" / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, tmp_path / "head" / "model.safetensors", {"format": "pt"})
    model.model.save_pretrained(tmp_path / "base")
    for name in ("head", "base"):
        reader = FolderWeights(tmp_path / name, model.config)
        assert torch.equal(logits(filled(model.config, reader)), logits(model))


def test_ties_that_the_weights_contradict_are_refused(tmp_path: Path) -> None:
    model = save(shape_of("llama", tie_word_embeddings=False), tmp_path)
    model.config.tie_word_embeddings = True
    with pytest.raises(RequestError, match=r"ties .*lm_head.* but they differ"):
        FolderWeights(tmp_path, model.config)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_weights_that_are_converted_on_loading_are_loaded_as_a_whole(
    family: str, tmp_path: Path
) -> None:
    model = save(shape_of(family), tmp_path)
    said: list[str] = []
    reader = pretrained_reader(str(tmp_path), model.config, said.append)
    assert not isinstance(reader, FolderWeights)
    assert "loads the whole model" in said[0]
    assert torch.equal(logits(filled(model.config, reader)), logits(model))


def test_a_pretrained_model_is_made_on_meta_with_its_generation_config(tmp_path: Path) -> None:
    model = create_model(shape_of("llama"), seed=1)
    model.generation_config.temperature = 0.25
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    meta = pretrained_on_meta(str(tmp_path))
    assert all(p.is_meta and p.dtype == torch.float32 for p in meta.parameters())
    assert meta.generation_config.temperature == 0.25
    said: list[str] = []
    reader = pretrained_reader(str(tmp_path), meta.config, said.append)
    assert isinstance(reader, FolderWeights)
    assert said == []
    assert torch.equal(logits(filled(meta.config, reader)), logits(load_model(str(tmp_path))))


def test_a_folder_without_a_model_or_with_less_than_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot load this model"):
        pretrained_on_meta(str(tmp_path))
    model = save(shape_of("llama"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"not complete.*up_proj"):
        pretrained_reader(str(tmp_path), model.config, print)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(RequestError, match="cannot load this model"):
        pretrained_reader(str(tmp_path), model.config, print)


def test_initial_buffers_take_no_memory_of_the_parameters() -> None:
    config = AutoConfig.for_model(
        "gemma3_text", **{**SIZES, "vocab_size": 10**9, "hidden_size": 4096}
    )
    model = model_on_meta(config)
    buffers = initial_buffers(model)  # the embedding alone would be 16 TB
    assert float(buffers["model.embed_tokens.embed_scale"]) == 64.0
    assert buffers["model.rotary_emb.sliding_attention_inv_freq"][0] == 1


def private_bytes() -> int:
    """Resident memory without the pages of mapped files."""
    return int(psutil.Process().memory_info().rss - psutil.Process().memory_info().shared)


def task_memory(kind: str, folder: str) -> int:
    """The most host memory in use while a quarter of every tensor is read."""
    config = AutoConfig.from_pretrained(folder)
    reader: Reader = (
        SeededWeights(config, 0) if kind == "seeded" else FolderWeights(Path(folder), config)
    )
    reader.read("model.norm.weight", (0,), (1,))
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back at once
    gc.collect()
    before, most = private_bytes(), 0
    for name in reader.names():
        shape = tuple(reader.shape(name))
        part = reader.read(name, (0,) * len(shape), (max(1, shape[0] // 4), *shape[1:]))
        most = max(most, private_bytes() - before)
        del part
    return most


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc and /proc")
@pytest.mark.parametrize("kind", ["seeded", "folder"])
def test_host_memory_stays_at_one_layer(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    """A quarter of a model of 16 equal layers is read, as one rank of four would."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 16}
    model = save(AutoConfig.for_model("llama", **sizes, tie_word_embeddings=True), tmp_path)
    layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    assert sum(p.numel() * 4 for p in model.parameters()) > 15 * layer
    (most,) = ranks.run(1, task_memory, kind, str(tmp_path))
    assert most < (2 if kind == "seeded" else 0.5) * layer
