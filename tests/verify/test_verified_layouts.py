"""How layouts are asked for, and how the model is shrunk for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from rostra.config import Config, config_from_dict
from rostra.errors import RequestError
from rostra.models import model_on_meta, shrunk
from rostra.verify import NAMED, parse
from rostra.verify.layouts import own_layout, with_layout
from rostra.verify.work import asked_layouts, checkable, whole_shape


def config_of(**sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"preset": "llama-3-8b"},
        "data": {"sources": [{"type": "python_docs"}], "tokenizer": {"vocabulary": 5000}},
        "train": {"steps": 10},
    }
    return config_from_dict(values | sections)


def test_layouts_are_names_keys_and_files(tmp_path: Path) -> None:
    listed = tmp_path / "listed.yaml"
    listed.write_text("- ddp\n- {shard: 2, sharding: zero1}\n- tensor=2, context=2\n")
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"mine": {"pipeline": 2}}))
    assert parse(["ddp, own", "shard=2,sharding=full_shard", str(table)]) == {
        "ddp": {"replicate": 2},
        "own": {},
        "shard=2,sharding=full_shard": {"shard": 2, "sharding": "full_shard"},
        "mine": {"pipeline": 2},
    }
    assert list(parse([str(listed)]).values()) == [
        {"replicate": 2}, {"shard": 2, "sharding": "zero1"}, {"tensor": 2, "context": 2},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("ful_shard", "did you mean full_shard"),
        ("shard=2,ddp", "'ddp' has no value"),
        ("nowhere.yaml", "cannot read"),
    ],
)
def test_what_is_no_layout_is_refused(value: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse([value])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"shards": 2}, "did you mean shard"),
        ({"shard": 0}, "shard"),
        ({"sharding": "x"}, "x: shar"),
    ],
)
def test_keys_that_a_layout_cannot_have_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        with_layout(config_of(), "x", keys)


def test_every_named_layout_can_be_had() -> None:
    config = config_of()
    config = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
    full = whole_shape(config)
    for name, keys in NAMED.items():
        case = checkable(with_layout(config, name, keys), full, 4, 8, config)
        assert case.layout is not None, case.reason
        assert case.layout.world_size == case.asked.ranks <= 4


def test_the_configs_own_layout_fits_the_ranks_that_there_are() -> None:
    large = config_of(parallel={"shard": 8, "tensor": 8, "sharding": "full_shard"})
    own = own_layout(large, 4)
    assert (own.ranks, own.keys["shard"], own.keys["tensor"]) == (4, 2, 2)
    assert own_layout(large, 64).keys["shard"] == 8
    assert own_layout(config_of(parallel={"sharding": "full_shard"}), 4).ranks == 2
    assert asked_layouts(config_of(), None, 4)[0].name == "ddp"  # it is one process
    kept = config_of(memory={"activation_checkpointing": "full"})
    assert asked_layouts(kept, None, 4)[0].name == "own"


def test_the_whole_model_decides_what_is_refused() -> None:
    config = config_of(
        model={"architecture": "llama", "size": {"hidden_size": 60, "layers": 3, "heads": 3}}
    )
    tensor = checkable(
        with_layout(config, "tensor", {"tensor": 2}), whole_shape(config), 4, 8, config
    )
    assert tensor.layout is None
    assert "3 attention heads" in tensor.reason
    four = with_layout(config, "four", {"pipeline": 4})
    assert "3 layers" in checkable(four, whole_shape(config), 4, 8, config).reason
    assert "--workers 4" in checkable(four, whole_shape(config), 2, 8, config).reason


LLAMA = LlamaConfig(
    vocab_size=32003, num_attention_heads=32, num_key_value_heads=8, intermediate_size=11008,
    num_hidden_layers=32, attention_dropout=0.1,
)  # fmt: skip
ODD = LlamaConfig(
    hidden_size=144, num_attention_heads=18, num_key_value_heads=9, num_hidden_layers=7
)
GEMMA = Gemma3TextConfig(num_hidden_layers=26, sliding_window=512, num_attention_heads=4)
MIXTURE = Qwen3MoeConfig(
    num_experts=128, num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4
)


@pytest.mark.parametrize(
    "full", [LLAMA, ODD, GEMMA, MIXTURE, GPT2Config()], ids=lambda x: x.model_type
)
def test_a_shrunk_model_is_split_as_the_whole_one(full: PretrainedConfig) -> None:
    small = shrunk(full, 6, 32)
    for key in ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "num_experts"):
        assert getattr(small, key, None) == getattr(full, key, None), key
    assert small.num_hidden_layers == 6
    assert set(getattr(small, "layer_types", None) or ()) == set(
        getattr(full, "layer_types", None) or ()
    )
    model = model_on_meta(small)
    assert sum(p.numel() for p in model.parameters()) < 2e7
    assert model.config.model_type == full.model_type
    if full is LLAMA:
        assert small.vocab_size % 16 == full.vocab_size % 16
        assert small.attention_dropout == 0
    if full is GEMMA:
        assert small.sliding_window == 16
