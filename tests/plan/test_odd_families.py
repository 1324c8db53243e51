"""Families whose layers the formulas have never seen are planned all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rostra.api import plan

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 500}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 8, "moe_intermediate_size": 32,
    },
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 128},
    "falcon": {},
    "gpt_neox": {"intermediate_size": 256},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_any_config_json_is_planned(tmp_path: Path, family: str, method: Any) -> None:
    AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]}).save_pretrained(tmp_path)
    told = plan(model=str(tmp_path), method=method, hardware="2xL4", length=256, trace=False)
    assert told.plan.chosen is not None
    assert told.plan.chosen.memory.kinds["activations"] > 0
