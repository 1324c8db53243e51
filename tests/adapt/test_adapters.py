"""Adapters: what peft makes of the files, and of the same section, is what is computed here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters_of_tests import TOKENS, adapted, saved, tiny, trained
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rostra.config.tuning import AdapterTable
from rostra.models import create_model, parameter_counts

KINDS = {
    "lora": {"kind": "lora", "rank": 4},
    "some": {"kind": "lora", "rank": 4, "alpha": 3},
    "rslora": {"kind": "lora", "rank": 4, "rslora": True},
    "dora": {"kind": "lora", "rank": 4, "dora": True},
    "whole": {"kind": "lora", "rank": 2, "modules_to_save": ("embed",)},
    "ends": {"kind": "lora", "rank": 2},
    "ia3": {"kind": "ia3"},
}
ENDS = {"gpt2": ["all-linear", "wte", "lm_head"]}  # embedding and head beside the body
FAMILIES = {
    "llama": (["q_proj", "v_proj"], "embed_tokens"),
    "qwen3": (["q_proj", "down_proj"], "lm_head"),
    "gpt2": (["c_attn", "mlp.c_proj"], "wte"),
    "gemma3_text": (["q_proj", "o_proj"], "embed_tokens"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_same_from_what_is_saved(family: str, tmp_path: Path) -> None:
    base = create_model(tiny(family, tie_word_embeddings=family != "qwen3"), seed=1).eval()
    base.save_pretrained(tmp_path / "base")
    plain = base(TOKENS).logits
    for kind, values in KINDS.items():
        section = dict(values)
        if kind == "some":
            section["targets"] = FAMILIES[family][0]
        if kind == "ends":
            section["targets"] = ENDS.get(family, ["q_proj", "embed_tokens", "lm_head"])
        if kind == "whole":
            section["modules_to_save"] = [FAMILIES[family][1]]
        table = AdapterTable(**section)
        new, _ = adapted(base, table)
        torch.testing.assert_close(new(TOKENS).logits, plain, rtol=1e-5, atol=1e-6, msg=kind)
        model, adapter = adapted(base, table, noise=0.05)
        expected = model(TOKENS).logits
        assert (expected - plain).abs().max() > 1e-3, kind
        folder = saved(model, adapter, tmp_path / kind, str(tmp_path / "base"))
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        found = PeftModel.from_pretrained(fresh, folder).eval()
        torch.testing.assert_close(found(TOKENS).logits, expected, rtol=1e-5, atol=1e-6, msg=kind)
        again, _ = adapted(base, AdapterTable(kind=values["kind"], pretrained=str(folder)))
        torch.testing.assert_close(again(TOKENS).logits, expected, rtol=1e-5, atol=1e-6, msg=kind)
        counts = parameter_counts(model)
        assert counts["trainable_parameters"] == sum(p.numel() for p in trained(model).values())
        assert counts["parameters"] > counts["trainable_parameters"]
