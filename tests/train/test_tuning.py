"""Fine-tuning from the config to what others load: adapters, quantised bases, examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from runs import of_kind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ranks import Ranks
from rostra import RequestError, Run
from rostra.adapt.quantized_weights import QuantizedWeights
from rostra.data import train_tokenizer
from rostra.events import Event
from rostra.generate import Sampling, all_stops, generate_text, load_for_generation
from rostra.train.finish import Evaluator

Values = Callable[..., dict[str, Any]]
WORDS = "the sun rose over a quiet harbour while small boats went out to sea again".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base as a hub has it, and records to tune on."""
    path = tmp_path_factory.mktemp("tuning")
    records = [
        {
            "instruction": f"Say word {n}.",
            "output": " ".join(WORDS[(n * k) % len(WORDS)] for k in range(1, 8)),
        }
        for n in range(40)
    ]
    (path / "records.json").write_text(json.dumps(records))
    texts = [f"{r['instruction']} {r['output']} Below is an instruction." for r in records]
    tokenizer = train_tokenizer(iter(texts * 4), 320)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(path / "base")
    tokenizer.save_pretrained(path / "base")
    return path


@pytest.fixture
def values(folder: Path, tmp_path: Path) -> Values:
    def make(name: str = "run", **sections: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "run": {"name": name, "output": str(tmp_path / name)},
            "model": {"pretrained": str(folder / "base")},
            "adapter": {"kind": "lora", "rank": 4},
            "data": {
                "sources": [{"type": "alpaca", "path": str(folder / "records.json")}],
                "sequence_length": 384,
                "held_out": 0.2,
                "cache": str(folder / "cache"),
            },
            "train": {"steps": 6, "global_batch_size": 4, "compile": False},
            "precision": {"compute": "fp32"},
            "optimizer": {"learning_rate": 1e-2, "weight_decay": 0},
            "monitor": {"tensorboard": False},
            "checkpoint": {"every": 3},
        }
        for key, section in sections.items():
            plain = isinstance(section, dict) and isinstance(found.get(key), dict)
            found[key] = {**found[key], **section} if plain else section
        return found

    return make


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 30)[None]).logits.float()


def test_a_tuned_run_from_records_to_a_merged_model(values: Values, folder: Path) -> None:
    run = Run.open(values())
    summary = run.train()
    assert summary["trainable_parameters"] < summary["parameters"] / 5
    assert not (run.path / "model").exists()
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    before = logits(base)
    tuned = logits(PeftModel.from_pretrained(base, run.path / "adapter"))
    assert (tuned - before).abs().max() > 1e-3
    found = run.evaluate()
    assert found["eval_loss"] == pytest.approx(summary["eval_loss"], abs=1e-5)
    assert isinstance(run.generate("Say word 3.", notice=pytest.fail), str)
    merged = run.merge(notice=lambda _: None)
    assert merged["perplexity_after"] == pytest.approx(merged["perplexity_before"], rel=0.05)
    again = logits(AutoModelForCausalLM.from_pretrained(run.path / "model", dtype=torch.float32))
    assert (again - tuned).abs().max() <= merged["rounding_bound"]
    assert run.evaluate()["eval_loss"] == pytest.approx(summary["eval_loss"], rel=0.05)


def test_it_goes_on_as_if_never_stopped(values: Values) -> None:
    """Adapter and optimizer come from the checkpoint, the base from its folder."""
    quantized = {"quantization": "nf4", "adapter": {"dropout": 0.1}, "train": {"neftune_alpha": 5}}
    undisturbed = Run.open(values("one", **quantized))
    undisturbed.train()
    broken = Run.open(values("two", **quantized))

    def stop(event: Event) -> None:
        if event.kind == "step" and event["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken.train([stop])
    broken.train()
    one, two = (
        load_file(run.path / "adapter" / "adapter_model.safetensors")
        for run in (undisturbed, broken)
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    told: list[str] = []
    undisturbed.generate("Say word 3.", Sampling(tokens=2), told.append)
    assert ["not in nf4" in said for said in told] == [True]


def test_a_base_is_quantised_once(
    values: Values, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []
    real = QuantizedWeights.quantized

    def counting(self: QuantizedWeights, layer: str) -> Any:
        made.append(layer)
        return real(self, layer)

    monkeypatch.setattr(QuantizedWeights, "quantized", counting)
    data = {"cache": str(tmp_path / "cache")}
    for name in ("one", "two"):
        Run.open(values(name, quantization="int8", data=data, train={"steps": 1})).train()
        assert len(made) == 2 * 7  # linear layers


@pytest.mark.parametrize(
    "sections",
    [
        {"adapter": {"kind": "prompt", "rank": 8, "virtual_tokens": 4, "prompt": "Say word"}},
        {"adapter": {"kind": "prefix", "rank": 8, "virtual_tokens": 4}},
        {"adapter": {"kind": "ia3", "rank": 8}},
        {"adapter": {"dora": True, "lora_plus_ratio": 4}, "quantization": "fp4"},
        {"adapter": "none", "optimizer": {"learning_rate": 1e-3}},
        {"data": {"packing": "none", "group_by_length": True}},
        {"data": {"tokenizer": {"added": ["<|step|>"]}}},
        {"precision": {"compute": "bf16"}, "memory": {"optimizer_states": "int8"}},
    ],
    ids=["prompt", "prefix", "ia3", "dora", "full", "grouped", "grown", "8-bit states"],
)
def test_every_way_learns(values: Values, sections: dict[str, Any]) -> None:
    losses: list[float] = []

    def listen(event: Event) -> None:
        if event.kind == "step":
            losses.append(event["loss"])

    # a step sees about all examples, so that losses can be compared
    asked = values(**sections, schedule={"warmup": 0})
    asked["train"]["global_batch_size"] = 16
    if asked["adapter"] != "none" and asked["adapter"]["kind"] in ("prompt", "prefix", "ia3"):
        asked["optimizer"]["learning_rate"] = 0.1
    summary = Run.open(asked).train([listen])
    assert losses[-1] < losses[0] - 0.005
    assert summary["eval_loss"] < losses[0]


SPOKEN = {"every": 6, "prompt": "Say word 3.", "prompt_tokens": 4}
SPEAKING: list[tuple[int, dict[str, Any]]] = [
    (1, {"adapter": {"kind": "prompt", "rank": 8, "virtual_tokens": 4}}),
    (1, {"adapter": {"kind": "prefix", "rank": 8, "virtual_tokens": 4}}),
    (2, {"adapter": {"kind": "prefix", "rank": 8, "virtual_tokens": 4}, "parallel": {"shard": 2}}),
    (2, {"parallel": {"shard": 2, "sharding": "full_shard", "engine": "deepspeed"}}),
]


def spoken(asked: dict[str, Any]) -> list[str]:
    """What a run's model writes after its last step, by itself and as it is saved."""
    torch.set_num_threads(1)
    run = Run.open(asked)
    with pytest.MonkeyPatch.context() as patch:
        likeliest = lambda self, tokens: Sampling(tokens, temperature=0)  # noqa: E731
        patch.setattr(Evaluator, "_sampling", likeliest)
        final = run.train()["generated"]
    during = of_kind(run.path, "generation")[0]
    assert (during["step"], during["prompt"]) == (6, "Say word 3.")
    return [during["text"], final]


@pytest.mark.parametrize(("count", "sections"), SPEAKING, ids=str)
def test_text_while_training_is_the_saved_adapters(
    values: Values, count: int, sections: dict[str, Any], ranks: Ranks
) -> None:
    """Virtual tokens come first, weights lie in parts; peft reads what was saved."""
    asked = values(**sections, evaluate=SPOKEN, optimizer={"learning_rate": 0.1})
    (during, final), *_ = ranks.run(count, spoken, asked) if count > 1 else [spoken(asked)]
    assert len(during) > 3
    assert final.startswith(during)


def test_grown_and_frozen_adapters_act_when_loaded(values: Values) -> None:
    grown = values("grown", data={"tokenizer": {"added": ["<|step|>"]}})
    Run.open(grown).train()
    frozen = Run.open(values("frozen"))
    frozen.train()
    on_top = {"frozen": [str(frozen.path / "adapter")]}
    both = values("both", adapter=on_top)
    Run.open(both).train()
    for asked in (grown, both):
        run = Run.open(asked)
        loaded, _ = load_for_generation(str(run.path))
        merged = run.merge(notice=lambda _: None)
        model = AutoModelForCausalLM.from_pretrained(run.path / "model", dtype=torch.float32)
        assert (logits(loaded) - logits(model)).abs().max() <= merged["rounding_bound"]
    prompt = Run.open(values("prompt", adapter={"kind": "prompt", "rank": 8, **on_top}))
    prompt.train()
    assert isinstance(prompt.generate("Say word 3."), str)


def test_a_model_stops_at_the_end_of_its_turn(values: Values, folder: Path) -> None:
    model, tokenizer = load_for_generation(str(folder / "base"))
    likeliest = Sampling(12, temperature=0)
    ids = tokenizer("<|endoftext|>Say", return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    end = written[5]
    name = tokenizer.convert_ids_to_tokens(end)
    tokenizer.add_special_tokens({"extra_special_tokens": [name]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + name + "{% endfor %}"
    before = tokenizer.decode(written[: written.index(end)], skip_special_tokens=True)
    assert generate_text(model, tokenizer, "Say", likeliest) == before
    assert all_stops(model.generation_config, tokenizer) == [tokenizer.eos_token_id, end]


def test_bad_requests_are_refused(values: Values, folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps([{"instruction": "Say.", "output": "word"}, {"instruction": "Say."}]))
    for sections, said in (
        ({"data": {"sources": [{"type": "alpaca", "path": str(bad)}]}}, r"bad.json, record 2"),
        ({"adapter": {"targets": ["q_prof"]}}, "adapter.targets: 'q_prof' names no module"),
        ({"adapter": "none", "quantization": "nf4"}, "weights of a few bits cannot be trained"),
        ({"adapter": "none", "model": {"pretrained": None, "preset": "tiny"}}, "tokenizer"),
    ):
        with pytest.raises(RequestError, match=said):
            Run.open(values(**sections)).train()
        assert not (tmp_path / "run").exists()
