"""Shapes of well-known models have the published numbers of parameters."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from rostra.errors import RequestError
from rostra.models import find_shape, shape_names
from rostra.plan.job import sizes_of
from support import SHARED_DATA

# Of the models' pages on the hub (safetensors) or papers.
PUBLISHED = {
    "huggyllama/llama-7b": 6_738_415_616,
    "huggyllama/llama-13b": 13_015_864_320,
    "huggyllama/llama-30b": 32_528_943_616,
    "huggyllama/llama-65b": 65_285_660_672,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "01-ai/Yi-34B": 34_388_917_248,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "microsoft/phi-1_5": 1_418_270_720,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "distilbert/distilgpt2": 81_912_576,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "EleutherAI/gpt-neo-125m": 125_198_592,
    "EleutherAI/gpt-neo-1.3B": 1_315_575_808,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-13b": 12_853_473_280,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-7b1": 7_069_016_064,
    "bigscience/bloom": 176_247_271_424,
    "tiiuae/falcon-7b": 6_921_720_704,
    "mosaicml/mpt-7b": 6_649_286_656,
    "bigcode/starcoder2-3b": 3_030_371_328,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "stabilityai/stablelm-3b-4e1t": 2_795_443_200,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
}


def test_parameters_are_those_published() -> None:
    found = {name: sizes_of(find_shape(name)).parameters for name in PUBLISHED}
    assert found == PUBLISHED


def test_every_entry_is_a_config_of_its_own_type() -> None:
    assert len(shape_names()) >= 120
    for name in shape_names():
        text = find_shape(name).get_text_config()
        assert text.num_hidden_layers > 0, name
        assert text.hidden_size % text.num_attention_heads == 0 or text.head_dim


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Llama-2-70b-hf", "meta-llama/Llama-2-70b-hf"),
        ("meta-llama/Llama-2-70b", "meta-llama/Llama-2-70b-hf"),
        ("meta-llama/Llama-2-70b-chat-hf", "meta-llama/Llama-2-70b-hf"),
        ("LLAMA 3 8B", "meta-llama/Meta-Llama-3-8B"),
        ("Llama-3.3-70B", "meta-llama/Llama-3.1-70B"),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B"),
        ("gpt2", "openai-community/gpt2"),
        ("gemma-3-27b-it", "google/gemma-3-27b-pt"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "Qwen/Qwen2.5-14B"),
        ("opt-13b", "facebook/opt-13b"),
        ("opt-1.3b", "facebook/opt-1.3b"),
        ("mpt-7b", "mosaicml/mpt-7b"),
        ("mpt-70b", "llm-foundry/mpt-70b"),
    ],
)
def test_names_are_forgiven_their_case_owner_and_variant(written: str, meant: str) -> None:
    assert find_shape(written).to_dict() == find_shape(meant).to_dict()


def test_variants_keep_what_differs() -> None:
    short, long = find_shape("Phi-3-mini-4k-instruct"), find_shape("Phi-3-mini-128k-instruct")
    assert (short.max_position_embeddings, long.max_position_embeddings) == (4096, 131072)
    assert sizes_of(short).parameters == sizes_of(long).parameters


def test_a_length_is_the_number_of_positions_where_that_is_open() -> None:
    assert find_shape("gpt2", 4096).n_positions == 1024
    assert find_shape("llm-foundry/mpt-1b", 512).n_positions == 512
    assert find_shape("llm-foundry/mpt-1b").n_positions == 1024


def test_a_folder_or_config_file_wins(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    find_shape("Qwen3-0.6B").save_pretrained(folder)
    for path in (folder, folder / "config.json"):
        assert sizes_of(find_shape(str(path))).parameters == 596_049_920


def test_what_cannot_be_read_or_found_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"did you mean .*Meta-Llama-3-8B.*config\.json"):
        find_shape("Llama-3-9B")
    with pytest.raises(RequestError, match=r"unknown shape.*folder or config\.json"):
        find_shape("")
    with pytest.raises(RequestError, match=r"empty: no model's config"):
        (tmp_path / "empty").mkdir()
        find_shape(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model_type": "nothing-known"}, "nothing-known"),
        ({"hidden_size": 64}, "Unrecognized model"),
        ([], "no model's config"),
        (None, "no model's config"),
        ({"model_type": "llama", "hidden_size": "wide"}, r"no model can be so: .*'hidden_size'"),
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5}, "not a multiple"),
        ({"model_type": "t5"}, "a t5 does not write"),
        ({"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}}, "custom code"),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: object, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(RequestError, match=said):
        find_shape(str(tmp_path))


def test_shapes_of_published_benchmarks_have_their_parameters() -> None:
    path = SHARED_DATA / "published" / "mpt_throughput.csv"
    if not path.exists():
        pytest.skip("no published measurements here")
    with path.open() as file:
        rows = {
            (r["model"], int(r["sequence_length"]), int(r["num_params"]))
            for r in csv.DictReader(file)
        }
    for model, length, parameters in rows:
        assert sizes_of(find_shape(f"llm-foundry/mpt-{model}", length)).parameters == parameters
