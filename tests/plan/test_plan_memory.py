"""Memory by formulas: against the trace of the engine itself, and what users rely on."""

from __future__ import annotations

import csv
import importlib.util
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
)

from rostra.config import Config, config_from_dict
from rostra.hardware.catalogue import read_cluster
from rostra.hardware.cluster import Cluster, Device, Link, Node
from rostra.layout import Layout
from rostra.plan.job import Job, job_of
from rostra.plan.memory import MemoryModel
from rostra.plan.memory.weights import FLOAT, pinned
from rostra.plan.results import KINDS
from rostra.plan.trace import traced

GIB = 2**30
LINK = Link("memory", 1e10, 1e-6)
PROCESSORS = Device("processors", "cpu", 64 * GIB, {"fp32": 1e12}, 1e11, 100)
MACHINE = Cluster(Node(PROCESSORS, 1, LINK, LINK, 64 * GIB, 1e11), 1, LINK)
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ROTARY = {**SIZES, "intermediate_size": 1024, "num_key_value_heads": 4, "head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "qwen3": {**ROTARY, "tie_word_embeddings": True},
    "gemma3_text": {**ROTARY, "sliding_window": 512},
    "gpt2": {**SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def config_of(length: int, samples: int, **sections: Any) -> Config:
    tuned = "adapter" in sections
    data: dict[str, Any] = {
        "sources": [{"type": "python_docs"}],
        "sequence_length": length,
        "isolate_documents": False,
    }
    return config_from_dict(
        {
            "model": {"pretrained": "base"} if tuned else {"preset": "tiny"},
            "data": data if tuned else {**data, "tokenizer": {"vocabulary": 300}},
            "train": {"steps": 10, "global_batch_size": samples},
            **sections,
        }
    )


def job(
    layout: Layout, family: str = "llama", length: int = 256, sections: Any = None, **sizes: Any
) -> Job:
    samples = layout.micro_batch * layout.accumulation * layout.data
    shape = AutoConfig.for_model(family, **{**FAMILIES[family], **sizes})
    return job_of(config_of(length, samples, **(sections or {})), shape)


FULL = {"sharding": "full_shard"}
STAGED = {"pipeline": 2, "pipeline_schedule": "1f1b"}
LORA = {"adapter": {"kind": "lora"}}
CASES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "one process": ("llama", Layout(4, 1), {}),
    "bf16, selective": (
        "qwen3",
        Layout(4, 1, compute="bf16", activation_checkpointing="selective:operations"),
        {},
    ),
    "gemma, full": ("gemma3_text", Layout(2, 1, activation_checkpointing="full"), {}),
    "gpt2, accumulation": ("gpt2", Layout(2, 3, compute="bf16"), {}),
    "zero1": ("llama", Layout(2, 1, shard=4, sharding="zero1", compute="bf16_pure"), {}),
    "full_shard": ("llama", Layout(2, 2, shard=8, compute="bf16", **FULL), {}),  # type: ignore[arg-type]
    "hybrid": (
        "llama",
        Layout(2, 1, shard=2, replicate=2, sharding="hybrid_shard", reduction="bf16"),
        {},
    ),
    "tensor": ("llama", Layout(2, 1, tensor=2, compute="bf16"), {}),
    "pipeline": ("qwen3", Layout(2, 4, **STAGED), {}),  # type: ignore[arg-type]
    "qlora": (
        "llama",
        Layout(2, 1, compute="bf16", adapter="lora", quantization="nf4"),
        {**LORA, "quantization": "nf4"},
    ),
}


def error(name: str) -> float:
    family, layout, sections = CASES[name]
    sought = job(layout, family, sections=sections)
    told, real = MemoryModel(sought, MACHINE)(layout), traced(sought, layout, MACHINE)
    assert told.kinds["parameters"] + told.kinds["quantization"] == pytest.approx(
        real.kinds["parameters"] + real.kinds["quantization"], rel=0.001
    )
    assert told.kinds["optimizer"] == pytest.approx(real.kinds["optimizer"], rel=0.001)
    return told.live / real.live - 1


def test_formulas_give_what_the_engine_takes() -> None:
    errors = {name: abs(error(name)) for name in CASES}
    assert statistics.median(errors.values()) < 0.01, errors
    assert max(errors.values()) < 0.03, errors


def large(length: int = 4096, **values: Any) -> tuple[MemoryModel, Layout]:
    """Llama 3 8B on H100s."""
    layout = Layout(**{"micro_batch": 1, "accumulation": 1, **values})
    shape = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    config = config_of(length, layout.micro_batch * layout.accumulation * layout.data)
    return MemoryModel(job_of(config, shape), read_cluster("8xH100")), layout


def test_training_in_full_holds_16_bytes_a_parameter() -> None:
    """Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1."""
    model, layout = large(replicate=8)
    kinds = model(layout).kinds
    held = kinds["parameters"] + kinds["optimizer"] + kinds["gradients"]
    assert held == pytest.approx(16 * model.job.sizes.parameters, rel=0.001)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_sharding_divides_what_lasts(ranks: int) -> None:
    model, layout = large(shard=ranks, sharding="full_shard")
    kinds = model(layout).kinds
    held = kinds["parameters"] + kinds["optimizer"]
    assert held == pytest.approx(12 * model.job.sizes.parameters / ranks, rel=0.01)


def test_every_checkpointing_mode_saves_as_much_as_it_should() -> None:
    """The order of Korthikanti et al. 2022, arXiv:2205.05198."""
    model, layout = large(shard=8, sharding="full_shard", compute="bf16", micro_batch=4)
    modes = ("none", "selective:attention", "selective:mlp", "selective:operations", "every:2")
    needs = {
        mode: model(replace(layout, activation_checkpointing=mode)).live
        for mode in (*modes, "full", "offload")
    }
    assert needs["full"] == min(needs[mode] for mode in (*modes, "full"))
    assert needs["none"] == max(needs.values())
    assert needs["full"] < needs["every:2"] < needs["none"]


@pytest.mark.parametrize("sharding", ["no_shard", "full_shard"])
def test_more_samples_at_once_need_more(sharding: Any) -> None:
    axis = "replicate" if sharding == "no_shard" else "shard"
    model, layout = large(sharding=sharding, accumulation=8, **{axis: 8})
    needs = [model(replace(layout, micro_batch=n)).total for n in (1, 2, 4, 8)]
    assert needs == sorted(set(needs))


def test_offloading_moves_to_the_host() -> None:
    model, layout = large(shard=8, sharding="full_shard", compute="bf16")
    away = replace(layout, offload_optimizer="cpu", offload_parameters="cpu")
    here, there = model(layout), model(away)
    assert here.host == 0
    assert there.kinds["optimizer"] == there.kinds["parameters"] == 0
    assert there.host >= here.kinds["optimizer"] + here.kinds["parameters"]
    more, more_away = (model(replace(x, accumulation=4)) for x in (layout, away))
    assert more.kinds["gradients"] > 0 == more_away.kinds["gradients"]  # sent layer by layer
    kept = model(replace(layout, activation_checkpointing="offload"))
    assert kept.host > here.kinds["activations"] / 2
    assert kept.live < here.live


@pytest.mark.parametrize("parameters", ["none", "cpu"])
def test_loading_and_saving_need_no_more_of_the_host_than_a_step(parameters: Any) -> None:
    """A layer that is read, and a stretch that is written; no gradients."""
    model, layout = large(shard=8, sharding="full_shard", compute="bf16")
    away = model(replace(layout, offload_optimizer="cpu", offload_parameters=parameters))
    assert away.host_peak == away.host
    weights = FLOAT * model.job.sizes.parameters / 8
    assert away.saving_host == pytest.approx(3 * weights, rel=0.2)  # with AdamW's moments
    assert away.loading_host < away.host - weights / 2
    assert model(layout).saving_host < 10**7
    assert model(layout).loading_host < weights


def test_zero1_keeps_a_part_of_the_states_on_the_host() -> None:
    model, layout = large(shard=8, sharding="zero1", offload_optimizer="cpu")
    assert model(layout).host == pytest.approx(16 * model.job.sizes.parameters / 8, rel=0.2)


def test_pinned_memory_comes_in_powers_of_two() -> None:
    sizes = {0: 0, 1: 1, 4096: 4096, 4097: 8192, 1_210_318_848: 2**31}
    assert {size: pinned(size) for size in sizes} == sizes


def test_only_gpus_keep_blocks() -> None:
    model, layout = large(shard=8, sharding="full_shard")
    assert model(layout).kinds["reserved"] > 500 << 20
    assert MemoryModel(model.job, MACHINE)(layout).kinds["reserved"] == 0


def test_low_bit_states_and_bases() -> None:
    model, layout = large(replicate=8)
    whole, small = (
        model(replace(layout, optimizer_states=s)).kinds["optimizer"] for s in ("fp32", "int8")
    )
    assert small == pytest.approx(whole / 4, rel=0.03)


def test_kinds_are_those_of_every_plan() -> None:
    model, layout = large()
    memory = model(layout)
    assert tuple(memory.kinds) == KINDS
    assert min(memory.kinds.values()) >= 0
    assert memory.source == "formula"


def test_a_family_that_the_formulas_have_never_seen() -> None:
    shape: PretrainedConfig = GPTNeoXConfig(
        vocab_size=4096, hidden_size=384, num_hidden_layers=4, num_attention_heads=6,
        intermediate_size=1536,
    )  # fmt: skip
    layout = Layout(2, 1, shard=2, sharding="full_shard")
    sought = job_of(config_of(256, 4), shape)
    memory = MemoryModel(sought, MACHINE)(layout)
    assert memory.source == "linears"
    assert memory.live == pytest.approx(traced(sought, layout, MACHINE).live, rel=0.15)


PUBLISHED = Path(__file__).parents[3] / "shared/data/published/torchtitan_llama3.csv"


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="published measurements are not here")
def test_published_peaks() -> None:
    path = Path(__file__).parents[2] / "benchmarks/published_memory.py"
    spec = importlib.util.spec_from_file_location("published_memory", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    with PUBLISHED.open() as file:
        rows = [row for row in csv.DictReader(file) if row["peak_memory_gib"]]
    errors = [abs(benchmark.compare(row)["error"]) for row in rows]
    assert statistics.mean(errors) < 0.05
    # of the same page: stages hand on slices of the positions, interleaved ones too
    staged = next(row for row in rows if row["pipeline"] != "1")
    interleaved = {**staged, "schedule": "Interleaved1F1B", "peak_memory_gib": "72.7"}
    assert abs(benchmark.compare(interleaved)["error"]) < 0.15
