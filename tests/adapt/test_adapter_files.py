"""Adapters that peft saved, and saved ones that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_of_tests import TOKENS, adapted, saved, tiny, trained
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from rostra.adapt import add_adapter, head_update, read_adapter
from rostra.config.tuning import AdapterTable
from rostra.errors import RequestError
from rostra.models import create_model, model_on_meta


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return create_model(tiny("llama"), seed=1).eval()


def by_peft(base: PreTrainedModel, config: Any, folder: Path) -> torch.Tensor:
    """An adapter that peft made, changed and saved; the logits with it."""
    model = get_peft_model(create_model(base.config, seed=1), config).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        model.save_pretrained(folder)
        logits: torch.Tensor = model(TOKENS).logits
    return logits


def lora(**values: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", **values)


def test_what_peft_saved_goes_on_and_acts_frozen(base: PreTrainedModel, tmp_path: Path) -> None:
    ia3 = IA3Config(task_type="CAUSAL_LM")
    patterns = {"rank_pattern": {"down_proj": 3}, "layers_to_transform": [1]}
    cases = {
        "lora": lora(r=2, target_modules=["q_proj", "down_proj"], use_dora=True),
        "patterns": lora(r=2, target_modules=["down_proj", "v_proj"], **patterns),
        "regex": lora(r=2, target_modules=r".*\.1\.mlp\.\w+_proj", use_rslora=True),
        "whole": lora(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "ends": lora(r=2, target_modules=["q_proj", "embed_tokens", "lm_head"]),
        "ia3": ia3,
    }
    for name, config in cases.items():
        expected = by_peft(base, config, tmp_path / name)
        table = AdapterTable(
            kind="ia3" if name == "ia3" else "lora", pretrained=str(tmp_path / name)
        )
        model, _ = adapted(base, table)
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-6, msg=name)
    one, two = by_peft(base, cases["patterns"], tmp_path / "one"), base(TOKENS).logits
    frozen = (str(tmp_path / "one"), str(tmp_path / "lora"))
    model, _ = adapted(base, AdapterTable(kind="lora", rank=2, frozen=frozen))
    assert {name.split(".")[-2] for name in trained(model)} == {"default"}
    both = model(TOKENS).logits
    alone, _ = adapted(base, AdapterTable(kind="prompt", virtual_tokens=2, frozen=frozen[:1]))
    torch.testing.assert_close(alone(TOKENS).logits, one, rtol=1e-5, atol=1e-6)
    assert min((both - x).abs().max() for x in (one, two)) > 1e-3
    model(TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for p in trained(model).values())


def rows_changed(base: PreTrainedModel, by: float) -> PreTrainedModel:
    changed = create_model(base.config, seed=1).eval()
    with torch.no_grad():
        changed.get_input_embeddings().weight[5:9] += by
    return changed


def test_a_base_table_that_peft_saved_is_handed_on(base: PreTrainedModel, tmp_path: Path) -> None:
    """Its owner had set rows of tokens that nobody had trained; what is learned beside them is
    worth nothing without them."""
    folders = {by: tmp_path / f"by {by}" for by in (1, 2)}
    for by, folder in folders.items():
        config = lora(r=2, target_modules=["q_proj", "embed_tokens"])
        get_peft_model(rows_changed(base, by), config).save_pretrained(folder)
    section = AdapterTable(kind="lora", pretrained=str(folders[1]))
    model, adapter = adapted(base, section, noise=0.05)
    expected = model(TOKENS).logits
    again = saved(model, adapter, tmp_path / "again")
    found = PeftModel.from_pretrained(create_model(base.config, seed=1), again).eval()
    torch.testing.assert_close(found(TOKENS).logits, expected, rtol=1e-5, atol=1e-6)
    both = AdapterTable(kind="lora", frozen=tuple(map(str, folders.values())))
    with pytest.raises(RequestError, match=r"by 2: its .*embed_tokens.* is not that of .*by 1"):
        add_adapter(model_on_meta(base.config), both)


def test_a_head_with_a_bias_of_its_own(base: PreTrainedModel, tmp_path: Path) -> None:
    by_peft(base, lora(r=2, target_modules=["q_proj", "lm_head"], lora_bias=True), tmp_path)
    model, _ = adapted(base, AdapterTable(kind="lora", pretrained=str(tmp_path)))
    hidden = torch.randn(2, 3, base.config.hidden_size)
    head: Any = model.get_output_embeddings()
    update = head_update(head, hidden)
    assert update is not None
    logits = head.base_layer(hidden) + update[0] @ update[1].T
    torch.testing.assert_close(logits, head(hidden))
    assert (update[0] @ update[1].T)[:, 0].std(0).max() > 0


def test_updates_of_tied_embeddings_that_are_one_are_refused(tmp_path: Path) -> None:
    tied = tiny("llama", tie_word_embeddings=True)
    tied.tie_word_embeddings = True
    config = lora(r=2, target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True)
    by_peft(create_model(tied, seed=1), config, tmp_path)
    for values in ({"pretrained": str(tmp_path)}, {"frozen": (str(tmp_path),)}):
        with pytest.raises(RequestError, match=r"ensure_weight_tying.*merge it"):
            add_adapter(model_on_meta(tied), AdapterTable(**{"kind": "lora"} | values))


def test_what_does_not_fit_is_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    folder = str(tmp_path / "lora")
    by_peft(base, lora(r=2, target_modules=["q_proj"]), Path(folder))
    body = str(tmp_path / "body")
    by_peft(base, lora(r=2, target_modules="all-linear"), Path(body))
    narrow = tiny("llama", intermediate_size=48)
    narrow.num_attention_heads = 2
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rank": 4, "pretrained": folder}, r"adapter.rank = 4: .* has 2"),
        ({"targets": ("v_proj",), "pretrained": folder}, "adapter.targets = .*q_proj"),
        ({"kind": "ia3", "pretrained": folder}, "adapter.kind = ia3"),
        ({"kind": "ia3", "frozen": (folder,)}, "adapter.frozen: .* of kind lora"),
        ({"targets": ("qproj",)}, "'qproj' names no module .* q_proj"),
        ({"kind": "ia3", "targets": ("lm_head",)}, "lm_head is no linear layer of the model's b"),
        ({"dora": True, "targets": ("embed_tokens",)}, "no linear layer .*modules_to_save"),
        ({"targets": ("norm",)}, "model.norm is no linear layer or embedding; leave it out$"),
        ({"modules_to_save": ("lm_heed",)}, "'lm_heed' names no module"),
        ({"targets": "q_proj"}, "'q_proj' matches the whole name of no module"),
        ({"dora": True, "targets": ".*_head"}, "lm_head is no linear layer of the model's body"),
        ({"targets": ("lm_head",), "modules_to_save": ("lm_head",)}, "lm_head.* is adapted too"),
        ({"targets": "all-linear", "pretrained": folder}, "adapter.targets = all-linear: .*q_proj"),
        ({"targets": ("all-linear", "lm_head"), "pretrained": body}, "adapter.targets = .*lm_head"),
        ({"modules_to_save": ("q_proj",)}, "q_proj.* is adapted too"),
        ({"pretrained": str(tmp_path / "none")}, "adapter.pretrained: .*cannot read this adapter"),
        ({"kind": "prompt", "frozen": (str(tmp_path / "prompt"),)}, "kind prompt"),
    ]
    prompt = tmp_path / "prompt"
    by_peft_prompt(base, prompt)
    for values, message in cases:
        with pytest.raises(RequestError, match=message):
            add_adapter(model_on_meta(base.config), AdapterTable(**{"kind": "lora"} | values))
    narrow = tiny("llama")
    narrow.hidden_size = 64
    with pytest.raises(RequestError, match=r"lora_A.weight has the shape .2, 32. there"):
        add_adapter(model_on_meta(narrow), AdapterTable(kind="lora", pretrained=folder))
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    for key, value, what in (("bias", "all", "bias"), ("init_lora_weights", "pissa", "pissa")):
        changed = tmp_path / what
        changed.mkdir()
        (changed / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        weights = (tmp_path / "lora" / "adapter_model.safetensors").read_bytes()
        (changed / "adapter_model.safetensors").write_bytes(weights)
        with pytest.raises(RequestError, match=what):
            read_adapter(str(changed), "adapter.pretrained")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(RequestError, match="pickle"):
        read_adapter(str(tmp_path / "pickle"), "adapter.frozen")


def test_targets_by_a_pattern(base: PreTrainedModel, tmp_path: Path) -> None:
    """As peft takes it; and a section may say again what the saved adapter has."""
    pattern = r".*layers\.1\.self_attn\.[qk]_proj"
    table = AdapterTable(kind="lora", targets=pattern)
    model, adapter = adapted(base, table, noise=0.1)
    wrapped = {name.split(".lora_")[0] for name in trained(model)}
    assert wrapped == {f"model.layers.1.self_attn.{x}_proj" for x in "qk"}
    folder = saved(model, adapter, tmp_path / "saved")
    theirs = PeftModel.from_pretrained(create_model(base.config, seed=1), folder).eval()
    torch.testing.assert_close(model(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-5, atol=1e-6)
    again = AdapterTable(kind="lora", rank=8, targets=pattern, pretrained=str(folder))
    assert torch.equal(adapted(base, again)[0](TOKENS).logits, model(TOKENS).logits)
    scaled, _ = adapted(base, AdapterTable(kind="ia3", targets=pattern))
    assert {n.split(".ia3_")[0] for n in trained(scaled)} == wrapped
    whole, adapter = adapted(base, AdapterTable(kind="lora"))
    every = {"pretrained": str(saved(whole, adapter, tmp_path / "every")), "targets": "all-linear"}
    assert adapted(base, AdapterTable(kind="lora", **every))[1].saved is not None
    prompt, adapter = adapted(base, AdapterTable(kind="prompt", virtual_tokens=2))
    on = {"pretrained": str(saved(prompt, adapter, tmp_path / "p")), "rank": 8, "targets": None}
    assert adapted(base, AdapterTable(kind="prompt", **on))[1].virtual_tokens == 2


def by_peft_prompt(base: PreTrainedModel, folder: Path) -> None:
    from peft import PromptTuningConfig

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(create_model(base.config, seed=1), config).save_pretrained(folder)


def test_first_values_depend_on_seed_and_name_alone(base: PreTrainedModel) -> None:
    table = AdapterTable(kind="lora", rank=2, dora=True)
    one, two, other = (trained(adapted(base, table, seed=s)[0]) for s in (1, 1, 2))
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name])
        drawn = "lora_A" in name
        assert torch.equal(tensor, other[name]) != drawn, name
        if drawn:
            assert 0.5 < tensor.abs().max() * tensor.shape[1] ** 0.5 <= 1, name
    assert not any(torch.equal(x, y) for x, y in pairs(one))


def pairs(tensors: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = [t for n, t in tensors.items() if "q_proj.lora_A" in n]
    return [(x, y) for i, x in enumerate(drawn) for y in drawn[:i]]
