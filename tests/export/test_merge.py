"""Merged models against peft's own model of base and adapters, and what a merge refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from rostra import Run
from rostra.cli import merge as merge_verb
from rostra.config.tuning import QuantizationTable
from rostra.data import train_tokenizer
from rostra.errors import RequestError
from rostra.export import MergeFailed, Weighted, merge
from rostra.export.bases import open_base
from rostra.export.merge import write_weights
from rostra.export.merged import Merged
from rostra.export.updates import Update, open_updates
from rostra.memory import measure
from rostra.models import create_model

VOCABULARY = 270
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "vocab_size": VOCABULARY,
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
QV = ["q_proj", "v_proj"]
Made = tuple[str, str]  # the folders of a base and of an adapter
silent: Callable[[str], None] = lambda said: None  # noqa: E731


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(["a quiet harbour and small boats " * 20]), VOCABULARY).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def made(tokenizer: Path, tmp_path: Path) -> Callable[..., Made]:
    def make(
        family: str,
        config: Any,
        dtype: torch.dtype = torch.float32,
        rows: int | None = None,
        name: str = "adapter",
        **values: Any,
    ) -> Made:
        """A base of `family`, and an adapter that peft made for it and that does something."""
        base, adapter = tmp_path / "base", tmp_path / name
        if not base.exists():
            sizes = {**(GPT2 if family == "gpt2" else SIZES), **values}
            model = create_model(AutoConfig.for_model(family, **sizes), seed=1).to(dtype)
            for parameter in model.parameters():
                if not parameter.any():  # biases
                    torch.nn.init.normal_(parameter, std=0.2)
            model.config.dtype = dtype
            model.save_pretrained(base, max_shard_size="30KB")
            for file in tokenizer.iterdir():
                shutil.copy(file, base)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if rows:
            model.resize_token_embeddings(rows)
        save_adapter(model, config, adapter)
        return str(base), str(adapter)

    return make


def save_adapter(model: Any, config: Any, folder: Path, noise: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(len(folder.name))
    torch.manual_seed(0)  # for peft's own values
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    adapted.save_pretrained(folder)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(torch.arange(60, 84).view(2, 12), use_cache=False).logits
    return found


def plain(path: str | Path) -> Any:
    """As anybody loads it, without peft."""
    model, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values())
    return model


@dataclass(frozen=True)
class Case:
    family: str
    config: Any
    dtype: torch.dtype = torch.float32
    values: dict[str, Any] = field(default_factory=dict)
    tied: bool = False  # of the merged model
    rows: int | None = None  # that the embeddings grow to


TIED = {"tie_word_embeddings": True}
CASES = {
    "lora": Case("llama", LoraConfig(r=4, target_modules=QV), torch.bfloat16),
    "rslora with patterns": Case(
        "llama",
        LoraConfig(
            r=4, lora_alpha=3, target_modules="all-linear", use_rslora=True,
            rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.mlp.up_proj": 7},
        ),
    ),
    "dora and modules to save": Case(
        "llama",
        LoraConfig(r=4, target_modules=QV, use_dora=True, modules_to_save=["norm", "lm_head"]),
        torch.bfloat16,
    ),
    "ia3": Case(
        "llama",
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        torch.float16,
        {"attention_bias": True, "initializer_range": 0.2},
    ),
    "tied": Case("gemma3_text", LoraConfig(r=4, target_modules="all-linear"), tied=True),
    "tied, input changed": Case(
        "qwen3", LoraConfig(r=4, target_modules=[*QV, "embed_tokens"]), values=TIED
    ),
    "embedding and head": Case(
        "llama", LoraConfig(r=4, target_modules=["v_proj", "embed_tokens", "lm_head"])
    ),
    "tied, both changed apart": Case(
        "qwen3", LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"]), values=TIED
    ),
    "tied, both changed as one": Case(
        "qwen3",
        LoraConfig(r=4, target_modules=[*QV, "embed_tokens"], ensure_weight_tying=True),
        values=TIED,
        tied=True,
    ),
    "tied, input saved": Case(
        "gemma3_text", LoraConfig(r=4, target_modules=QV, modules_to_save=["embed_tokens"])
    ),
    "gpt2": Case(
        "gpt2",
        LoraConfig(r=4, target_modules=["c_attn", "c_fc", "wte"], use_dora=True),
        torch.bfloat16,
    ),
    "gpt2 ia3": Case(
        "gpt2",
        IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"]),
        tied=True,
    ),
    "grown": Case(
        "qwen3",
        LoraConfig(r=4, target_modules=QV),
        torch.bfloat16,
        {"tie_word_embeddings": True},
        tied=True,
        rows=VOCABULARY + 5,
    ),
    "grown and saved": Case(
        "llama",
        LoraConfig(r=4, target_modules=QV, modules_to_save=["embed_tokens", "lm_head"]),
        rows=VOCABULARY + 5,
    ),
    "experts that are converted on loading": Case(
        "qwen3_moe", LoraConfig(r=4, target_modules=QV), torch.bfloat16
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_merged_model_computes_what_peft_does(
    name: str, made: Callable[..., Made], tmp_path: Path
) -> None:
    case = CASES[name]
    base, adapter = made(case.family, case.config, case.dtype, case.rows, **case.values)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if case.rows:
        model.resize_token_embeddings(case.rows)
    expected = logits(PeftModel.from_pretrained(model, adapter))
    output = tmp_path / "out" / "model"
    found = merge(base, [Weighted(adapter)], output, notice=silent, shard_size="30KB")

    written = plain(output)
    exact = case.dtype == torch.float32
    largest = float(expected.abs().max())
    tolerance = largest * (1e-5 if exact else 4 * torch.finfo(case.dtype).eps)
    assert torch.allclose(logits(written), expected, rtol=0, atol=tolerance)
    assert found["logits_difference"] <= found["rounding_bound"]
    assert exact == (found["logits_difference"] < 1e-5 * largest)
    assert case.rows or found["adapter_effect"] > 20 * found["logits_difference"]
    embeddings = written.get_input_embeddings().weight, written.get_output_embeddings().weight
    assert (embeddings[0] is embeddings[1]) == case.tied == written.config.tie_word_embeddings
    assert written.config.vocab_size == len(embeddings[0]) == (case.rows or VOCABULARY)

    files = list(output.glob("*.safetensors"))
    tensors = {k: v for file in files for k, v in load_file(file).items()}
    assert len(files) > 1
    assert {v.dtype for v in tensors.values()} == {case.dtype}
    assert AutoModelForCausalLM.from_pretrained(output).dtype == case.dtype
    assert found["bytes"] == sum(f.stat().st_size for f in output.iterdir())
    assert AutoTokenizer.from_pretrained(output)("boats").input_ids


def test_updates_of_several_adapters_are_added_up(
    made: Callable[..., Made], tmp_path: Path
) -> None:
    first = LoraConfig(r=4, lora_alpha=6, target_modules=QV)
    second = LoraConfig(r=2, lora_alpha=3, target_modules=["v_proj", "up_proj"], use_rslora=True)
    base, one = made("llama", first, name="one")
    _, two = made("llama", second, name="second")
    merge(base, [Weighted(one, 0.5), Weighted(two, -2.0)], tmp_path / "sum", notice=silent)
    both = PeftModel.from_pretrained(plain(base), one, "one")
    both.load_adapter(two, "two")
    both.add_weighted_adapter(["one", "two"], [0.5, -2.0], "sum", "cat")
    both.set_adapter("sum")
    expected, found = logits(both), logits(plain(tmp_path / "sum"))
    assert torch.allclose(found, expected, atol=1e-5)
    merge(base, [Weighted(one), Weighted(two)], tmp_path / "whole", notice=silent)
    assert not torch.allclose(logits(plain(tmp_path / "whole")), expected, atol=1e-2)
    _, three = made("llama", LoraConfig(target_modules=QV, use_dora=True), name="dora")
    with pytest.raises(RequestError, match="only LoRA and rsLoRA"):
        merge(base, [Weighted(one), Weighted(three)], tmp_path / "no", notice=silent)


@pytest.mark.parametrize(("kind", "dtype"), [("nf4", torch.bfloat16), ("int8", torch.float32)])
def test_an_adapter_of_a_quantised_base_is_merged_into_what_it_saw(
    kind: str, dtype: torch.dtype, made: Callable[..., Made], tmp_path: Path
) -> None:
    lora = LoraConfig(r=4, target_modules=QV)
    base, adapter = made("llama", lora, dtype, hidden_size=64, head_dim=16)
    table = QuantizationTable(kind=kind)
    found, said = {}, []
    for dequantize in (True, False):
        output = tmp_path / str(dequantize)
        found[dequantize] = merge(
            base, [Weighted(adapter)], output,
            quantization=table, dequantize=dequantize, notice=said.append,
        )  # fmt: skip
    stored, seen = "difference_from_stored_base", "difference_from_quantized_base"
    assert 3 * found[True][seen] < found[True][stored]
    assert 3 * found[False][stored] < found[False][seen]
    assert found[True][seen] == found[True]["logits_difference"]
    assert found[False][stored] == found[False]["logits_difference"]
    assert (found[True]["dequantized"], found[False]["dequantized"]) == (True, False)
    assert "dequantised" in said[0]
    assert "weights on disk" in said[1]
    if kind == "nf4":
        options = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )  # fmt: skip
        low = AutoModelForCausalLM.from_pretrained(
            base, quantization_config=options, dtype=torch.float32, device_map="cpu"
        )
        expected = logits(PeftModel.from_pretrained(low, adapter))
        gap = {x: float((logits(plain(tmp_path / str(x))) - expected).abs().max()) for x in found}
        assert 4 * gap[True] < gap[False]


def test_a_base_that_is_quantised_on_disk_is_dequantised_openly(
    made: Callable[..., Made], tmp_path: Path
) -> None:
    lora = LoraConfig(r=4, target_modules=QV)
    base, adapter = made("llama", lora, torch.bfloat16, hidden_size=64, head_dim=16)
    low = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map="cpu"
    )
    low.save_pretrained(tmp_path / "low")
    expected = logits(PeftModel.from_pretrained(low, adapter)).float()
    said: list[str] = []
    found = merge(
        str(tmp_path / "low"), [Weighted(adapter)], tmp_path / "out", tokenizer=base,
        notice=said.append,
    )  # fmt: skip
    assert "quantised" in said[0]
    assert found["dequantized"]
    written = plain(tmp_path / "out")
    assert not hasattr(written.config, "quantization_config")
    assert float((logits(written) - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_what_is_not_base_and_adapter_is_an_error_and_leaves_nothing(
    made: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = made("llama", LoraConfig(r=4, target_modules=QV), torch.bfloat16)
    output = tmp_path / "out" / "model"

    def fails(match: str, path: str = adapter) -> None:
        with pytest.raises(MergeFailed, match=match) as caught:
            merge(base, [Weighted(path)], output, notice=silent)
        assert caught.value.exit_code == 4
        assert not list(output.parent.iterdir())

    get_peft_model(plain(base), LoraConfig(r=4, target_modules=QV)).save_pretrained(
        tmp_path / "nothing"
    )
    fails("the adapter does nothing", str(tmp_path / "nothing"))
    small = {k: v * (1e-5 if "_B" in k else 1) for k, v in tensors_of(adapter).items()}
    shutil.copytree(adapter, tmp_path / "small")
    save_file(small, tmp_path / "small" / "adapter_model.safetensors")
    fails("little but the bare base", str(tmp_path / "small"))
    scale = Update._scale
    monkeypatch.setattr(Update, "_scale", lambda *a: 1.1 * scale(*a))
    fails("rounding explains")


def tensors_of(adapter: str) -> dict[str, Tensor]:
    return load_file(Path(adapter) / "adapter_model.safetensors")


def test_what_cannot_be_merged_is_refused(made: Callable[..., Made], tmp_path: Path) -> None:
    base, adapter = made("llama", LoraConfig(r=4, target_modules=QV))

    def refused(match: str, path: str = adapter, output: str = "out", model: str = base) -> None:
        with pytest.raises(RequestError, match=match):
            merge(model, [Weighted(path)], tmp_path / output, notice=silent)
        assert not (tmp_path / "out").exists()

    refused("exists already", output="base")
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    get_peft_model(plain(base), prompt).save_pretrained(tmp_path / "prompt")
    refused("learned positions", str(tmp_path / "prompt"))
    refused("--adapter: .*nowhere", str(tmp_path / "nowhere"))
    other = tmp_path / "other"
    config = AutoConfig.for_model("llama", **{**SIZES, "hidden_size": 64})
    create_model(config, 1).save_pretrained(other)
    refused("the base it was trained on", model=str(other))
    create_model(AutoConfig.for_model("gpt2", **GPT2), 1).save_pretrained(tmp_path / "gpt2")
    refused("no such linear", model=str(tmp_path / "gpt2"))
    gptq = json.loads((Path(base) / "config.json").read_text())
    gptq["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    shutil.copytree(base, tmp_path / "gptq")
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(gptq))
    refused("gptq", model=str(tmp_path / "gptq"))
    for text in ("a:nan", ":2", "a:inf"):
        with pytest.raises(RequestError, match="PATH:WEIGHT"):
            Weighted.parse(text)
    assert Weighted.parse("a/b:0.5") == Weighted("a/b", 0.5)
    assert Weighted.parse("c:/d") == Weighted("c:/d")


def test_a_runs_adapters_become_its_model(
    made: Callable[..., Made], tiny: Callable[..., dict[str, Any]], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    base, frozen = made("llama", LoraConfig(r=4, target_modules=QV), name="frozen")
    _, more = made("llama", LoraConfig(r=4, target_modules=QV), name="one more")
    run = tmp_path / "run"
    values = tiny(
        model={"preset": None, "pretrained": base}, adapter={"kind": "lora", "frozen": [frozen]}
    )
    values["data"]["tokenizer"] = {}
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))
    with pytest.raises(RequestError, match="has no adapter/"):
        Run.open(run).merge()
    made("llama", LoraConfig(r=2, target_modules="all-linear"), name="run/adapter")

    capsys.readouterr()  # what libraries said while the adapters were made
    merge_verb(str(run), adapters=[], base=None, output=None, dequantize=None, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(run / "model")
    assert {"bytes", "logits_difference", "perplexity_before", "perplexity_after"} <= set(found)
    own = str(run / "adapter")
    merge(base, [Weighted(frozen), Weighted(own)], tmp_path / "same", notice=silent)
    assert same_weights(run / "model", tmp_path / "same")

    Run.open(run).merge(tmp_path / "sum", [f"{own}:0.5", f"{more}:2"], notice=silent)
    asked = ["--adapter", frozen, "--adapter", f"{run}:0.5", "--adapter", f"{more}:2"]
    merge_verb(
        None, adapters=asked[1::2], base=base, output=tmp_path / "same sum", dequantize=None,
        as_json=True,
    )  # fmt: skip
    assert same_weights(tmp_path / "sum", tmp_path / "same sum")
    assert not same_weights(tmp_path / "sum", run / "model")
    assert not (run / "lock.json").exists()
    with pytest.raises(RequestError, match="exists already"):
        Run.open(run).merge()


def same_weights(one: Path, other: Path) -> bool:
    left, right = (load_file(path / "model.safetensors") for path in (one, other))
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_writing_holds_one_file_and_a_tensor(made: Callable[..., Made], tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    base, adapter = made("llama", lora, **sizes)
    opened = open_base(base, None, True, silent)
    merged = Merged(opened.config, opened.weights, open_updates([Weighted(adapter)]))
    types = {name: opened.dtype(name) for name in merged.names()}
    for name in types:
        merged.tensor(name)  # from here on all files are mapped, which the counter takes for memory
    with measure(torch.nn.Identity(), device=torch.device("cpu")) as memory:
        write_weights(tmp_path, merged, types, 300_000)
    sizes_of = [4 * math.prod(merged.shape(name)) for name in merged.names()]
    assert memory.bytes["total"] < 300_000 + 4 * max(sizes_of) < sum(sizes_of) / 3
    assert len(list(tmp_path.glob("*.safetensors"))) > 10


def test_perplexity_is_measured_before_and_after(made: Callable[..., Made], tmp_path: Path) -> None:
    base, adapter = made("llama", LoraConfig(r=4, target_modules=QV))
    measured: list[Any] = []

    def perplexity(model: Any) -> float:
        measured.append(logits(model))
        return float(len(measured))

    found = merge(base, [Weighted(adapter)], tmp_path / "out", measure=perplexity, notice=silent)
    assert (found["perplexity_before"], found["perplexity_after"]) == (1.0, 2.0)
    assert torch.allclose(*measured, atol=1e-5)
    assert not torch.allclose(measured[0], logits(plain(base)), atol=1e-2)
