from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rostra.config.schema import ModelSection
from rostra.errors import RequestError
from rostra.models import (
    FAMILIES,
    PRESETS,
    create_model,
    decoder_layers,
    load_model,
    parameter_counts,
    scratch_config,
    split_head,
    takes_positions,
)

SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def section(**values: Any) -> ModelSection:
    return ModelSection.model_validate(values)


def small(architecture: str, **size: Any) -> PreTrainedModel:
    size = {"hidden_size": 32, "layers": 3, "heads": 4, **size}
    config = scratch_config(section(architecture=architecture, size=size), 101, 16, SPECIAL)
    return create_model(config, seed=0)


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_every_architecture_is_built_as_asked(architecture: str) -> None:
    model = small(architecture, intermediate_size=80, tie_embeddings=True)
    config = model.config
    assert config.num_hidden_layers == len(decoder_layers(model)) == 3
    assert config.hidden_size == 32
    assert config.vocab_size == 101
    assert config.eos_token_id == 0
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied
    assert takes_positions(model)
    untied = small(architecture, intermediate_size=80, tie_embeddings=False)
    extra = parameter_counts(untied)["parameters"] - parameter_counts(model)["parameters"]
    assert extra == 101 * 32


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_the_head_on_the_backbone_gives_the_models_logits(architecture: str) -> None:
    model = small(architecture).eval()
    head = split_head(model)
    assert head is not None
    tokens = torch.randint(0, 101, (2, 9))
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        expected = model(input_ids=tokens, use_cache=False).logits
        assert torch.allclose(head.logits(hidden), expected, atol=1e-6)


def test_a_head_with_a_softcap_is_understood_and_an_unknown_one_is_not_split() -> None:
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "vocab_size": 101,
    }  # fmt: skip
    gemma = AutoConfig.for_model("gemma2", **sizes, final_logit_softcapping=0.5)
    head = split_head(create_model(gemma, 0, "eager"))
    assert head is not None
    assert head.softcap == 0.5
    granite = AutoConfig.for_model("granite", **sizes, logits_scaling=8.0)
    assert split_head(create_model(granite, 0)) is None


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = small("llama"), small("llama")
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_is_a_config_of_its_size(preset: str) -> None:
    config = scratch_config(section(preset=preset), 1000, 128, SPECIAL)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert len(decoder_layers(model)) == PRESETS[preset][1]["layers"]


def test_published_shapes_have_their_published_sizes() -> None:
    sizes = {"llama-3-8b": (128256, 8.03e9), "mistral-7b": (32768, 7.25e9), "gpt2": (50257, 124e6),
             "qwen3-0.6b": (151936, 0.596e9), "llama-3.2-1b": (128256, 1.236e9),
             "gemma3-1b": (262144, 1.0e9)}  # fmt: skip
    for preset, (vocabulary, parameters) in sizes.items():
        config = scratch_config(section(preset=preset), vocabulary, 128, SPECIAL)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert parameter_counts(model)["parameters"] == pytest.approx(parameters, rel=0.01), preset


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"preset": "tiny", "architecture": "gpt2"}, "preset 'tiny' is a llama"),
        ({"preset": "nothing"}, "known: tiny"),
        ({"architecture": "llama"}, "give hidden_size, layers, heads"),
        ({"preset": "tiny", "size": {"heads": 5}}, "does not divide hidden_size"),
        ({"preset": "tiny", "size": {"kv_heads": 3}}, "does not divide heads"),
        ({"preset": "tiny", "size": {"heads": 5, "kv_heads": 5, "head_size": 8}}, "llama cannot"),
        ({"preset": "gpt2", "size": {"kv_heads": 3}}, "kv_heads"),
        ({"preset": "tiny", "size": {"positions": 64}}, "longer than model.size.positions"),
    ],
)
def test_an_impossible_shape_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        scratch_config(section(**values), 101, 128, SPECIAL)


def test_a_model_comes_back_from_its_folder(tmp_path: Path) -> None:
    model = small("qwen3")
    model.save_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"))
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no model weights"):
        load_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(RequestError, match="pickles"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(RequestError, match="cannot load this model"):
        load_model(str(tmp_path))


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    model = small("llama")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"not complete.*up_proj"):
        load_model(str(tmp_path))


def test_code_in_a_models_folder_is_not_run(tmp_path: Path) -> None:
    model = small("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    text = (tmp_path / "config.json").read_text()
    mapped = '{"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},'
    (tmp_path / "config.json").write_text(mapped + text.lstrip().removeprefix("{"))
    load_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()
