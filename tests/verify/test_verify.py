"""`rostra verify`: layouts that agree, one that does not, and what the command says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

import rostra.verify
from ranks import Ranks
from rostra.build import build_engine
from rostra.config import Config, config_from_dict
from rostra.errors import RequestError, TrainingFailed
from rostra.parallel import Engine
from rostra.verify import Verification, verify
from support import ended, start
from support import rostra as command

GPIPE = {"pipeline": 2, "pipeline_schedule": "gpipe"}
SIZE = {"hidden_size": 64, "layers": 6, "heads": 8, "kv_heads": 2, "intermediate_size": 128}


def values_of(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": model,
        "data": {
            "sources": [{"type": "text", "path": "nowhere"}],  # is not looked at
            "tokenizer": {"vocabulary": 5000},
            "sequence_length": 64,
        },
        "train": {"steps": 100, "global_batch_size": 64, "loss_chunk": 16},
        "optimizer": {"learning_rate": 1e-3},
    }
    return values | sections


def config_of(**sections: Any) -> Config:
    return config_from_dict(values_of({"architecture": "llama", "size": SIZE}, **sections))


def written(tmp_path: Path, model: dict[str, Any], **sections: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values_of(model, **sections)))
    return path


def mixture(folder: Path) -> dict[str, Any]:
    shape = Qwen3MoeConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(folder)
    return {"pretrained": str(folder)}


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe"])
def test_the_command_shows_that_layouts_agree(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(rostra.verify, "verify", partial(verify, pool=ranks))
    layouts = "ddp,tensor,interleaved_1f1b"
    model: dict[str, Any] = {"architecture": family, "size": SIZE}
    if family == "qwen3_moe":
        layouts, model = "zero1,full_shard", mixture(tmp_path / "model")
    path = written(tmp_path, model, memory={"activation_checkpointing": "full"})
    done = command("verify", path, "--layouts", layouts, "--json", "--steps", "3")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["agree"] is True
    assert [each["name"] for each in found["layouts"]] == layouts.split(",")
    for each in found["layouts"]:
        assert each["agrees"] is True
        assert each["loss_difference"] < 1e-5
        assert each["gradient_difference"] < 1e-4
        assert 0 < each["parameter_difference"] < 1e-4
        assert each["memory_bytes"] > 10_000
        assert each["layout"]["activation_checkpointing"] == "full"


def test_the_command_refuses_what_the_model_cannot_do(tmp_path: Path) -> None:
    """With ranks of its own, as always but here."""
    size = {**SIZE, "hidden_size": 72, "heads": 9, "kv_heads": 3}
    path = written(tmp_path, {"architecture": "llama", "size": size})
    done = ended(start("verify", path, "--layouts", "tensor=2", "--layouts", "ddp", "--steps", "1"))
    assert done.returncode == 2
    assert "refused" in done.stdout
    assert "agrees" in done.stdout
    assert "9 attention heads" in done.stderr
    assert "Traceback" not in done.stderr


def averaged(config: Config, layout: Any, *args: Any) -> Engine:
    """An engine that is wrong on several ranks: gradients are averages over the data ranks."""
    engine: Any = build_engine(config, layout, *args)
    collect = engine.gradients.collect

    def wrong() -> None:
        collect()
        for held in engine.gradients.held:
            held.value.grad /= layout.data

    engine.gradients.collect = wrong
    return engine


def unpublished(config: Config, layout: Any, *args: Any) -> Engine:
    """An engine on whose second rank the optimizer takes no part."""
    engine: Any = build_engine(config, layout, *args)
    if engine.place[0] == 1:
        engine.optimizers.step = lambda: None
    return engine


def crashing(config: Config, layout: Any, *args: Any) -> Engine:
    if layout.world_size > 1:
        raise ZeroDivisionError("as the test wants it")
    return build_engine(config, layout, *args)


@pytest.mark.parametrize("build", [averaged, unpublished])
def test_a_wrong_layout_is_seen(ranks: Ranks, build: Any) -> None:
    layouts = {"right": {"context": 2}, "wrong": {"shard": 2, "sharding": "full_shard"}}
    found = verify(config_of(), layouts, steps=3, pool=ranks, build=build)
    assert [each.agrees for each in found.layouts] == [True, False]
    assert not found.agree
    with pytest.raises(TrainingFailed, match=r"1 of 2 layouts.*the worst is wrong") as raised:
        found.check()
    assert raised.value.exit_code == 4


def test_a_wrong_layout_ends_the_command_with_4(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rostra.verify, "verify", partial(verify, build=averaged, pool=ranks))
    path = written(tmp_path, {"architecture": "llama", "size": SIZE})
    done = command("verify", path, "--layouts", "ddp", "--steps", "2", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["agree"] is False
    assert "the worst is ddp: its gradient differs by 5.0e-01" in done.stderr


def test_a_layout_that_crashes_does_not_agree(ranks: Ranks) -> None:
    found = verify(config_of(), {"ddp": {"replicate": 2}}, steps=1, pool=ranks, build=crashing)
    assert found.layouts[0].agrees is False
    with pytest.raises(TrainingFailed, match="ddp failed: ZeroDivisionError: as the test wants"):
        found.check()


def test_the_layout_in_one_process_is_tried_too(ranks: Ranks) -> None:
    config = config_of(memory={"activation_checkpointing": "every:2"})
    found = verify(config, {"own": {}}, steps=2, pool=ranks)
    assert found.agree
    assert found.layouts[0].asked.ranks == 1
    assert found.to_dict()["layouts"][0]["layout"]["activation_checkpointing"] == "every:2"


def test_bfloat16_has_the_tolerance_that_one_process_shows(ranks: Ranks) -> None:
    layouts = {"full_shard": {"shard": 2, "sharding": "full_shard"}, "context": {"context": 2}}
    found = verify(config_of(), layouts, steps=3, pool=ranks, precision="bf16")
    assert found.agree, found.to_dict()
    assert 1e-5 < found.tolerance.loss < 0.1
    wrong = verify(config_of(), layouts, steps=3, pool=ranks, precision="bf16", build=averaged)
    assert [each.agrees for each in wrong.layouts] == [False, True]


def test_muon_has_the_tolerance_that_one_process_shows(ranks: Ranks) -> None:
    muon = {"name": "muon", "learning_rate": 4e-3, "matrix_learning_rate": 0.02}
    found = verify(config_of(optimizer=muon), {"ddp": {"replicate": 2}}, steps=3, pool=ranks)
    assert found.agree, found.to_dict()
    wrong = verify(
        config_of(optimizer=muon), {"ddp": {"replicate": 2}}, steps=3, pool=ranks, build=averaged
    )
    assert not wrong.agree


def test_a_tuned_config_is_tried_with_its_adapter(ranks: Ranks, tmp_path: Path) -> None:
    shape = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    values = values_of({"pretrained": str(tmp_path)}, adapter="lora", quantization="nf4")
    values["data"] = {"sources": [{"type": "alpaca", "path": "nowhere"}], "sequence_length": 64}
    layouts = {"full_shard": {"shard": 2, "sharding": "full_shard"}, "gpipe": GPIPE}
    found = verify(config_from_dict(values), layouts, steps=3, pool=ranks)
    assert found.agree, found.to_dict()
    assert found.to_dict()["layouts"][0]["layout"]["quantization"] == "nf4"
    assert found.to_dict()["layouts"][0]["parameter_difference"] > 0


def test_what_is_refused_is_no_disagreement_unless_it_was_asked_for(ranks: Ranks) -> None:
    layouts = {"ddp": {"replicate": 2}, "no": {"tensor": 3}}
    found = verify(config_of(), layouts, steps=1, pool=ranks)
    assert [each.agrees for each in found.layouts] == [True, None]
    assert found.agree
    with pytest.raises(RequestError, match=r"layout no: parallel.tensor = 3: does not divide"):
        found.check()
    found.asked = False
    found.check()
    Verification.check(replace(found, layouts=found.layouts[:1], asked=True))


def test_a_precision_that_does_not_exist_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RequestError, match="--precision fp3: is fp32, bf16"):
        verify(config_of(), {"ddp": {"replicate": 2}}, pool=ranks, precision="fp3")
