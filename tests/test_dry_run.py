"""A dry run tells what real ranks hold and send, and finds layouts that cannot work."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, PretrainedConfig

from parallel import common
from parallel.common import CPU
from ranks import Ranks
from rostra.batch import Batch
from rostra.build import build_engine
from rostra.config import Config, config_from_dict
from rostra.dry_run import DryRun, dry_run
from rostra.errors import RequestError
from rostra.events import Events
from rostra.layout import Layout
from rostra.memory import KINDS, measure
from rostra.models.weights import SeededWeights, model_on_meta

SAMPLES = 64
BASE = {"micro_batch": 1, "accumulation": 2}


def config_of(length: int = 64, samples: int = SAMPLES) -> Config:
    return common.config_of(
        data={"sequence_length": length, "isolate_documents": False},
        train={"global_batch_size": samples, "loss_chunk": 1024},
    )


def llama(layers: int = 8) -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


def llama_70b() -> PretrainedConfig:
    """The shape of Llama 3 70B (Grattafiori et al. 2024, arXiv:2407.21783, table 3)."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )


def llama_405b() -> PretrainedConfig:
    """The shape of Llama 3.1 405B (Grattafiori et al. 2024, arXiv:2407.21783, table 3)."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def dry(rank: int = 0, shape: PretrainedConfig | None = None, **layout: Any) -> DryRun:
    return dry_run(config_of(), Layout(**{**BASE, **layout}), shape or llama(), rank)


def really(layout: dict[str, Any], samples: int) -> dict[str, Any]:
    """What this rank holds and calls in a second step of the engine itself."""
    shape = llama()
    config, weights = config_of(samples=samples), SeededWeights(shape, 0)
    model = model_on_meta(shape)
    engine = build_engine(config, Layout(**layout), model, CPU, 10, Events(), weights)
    rows, length = layout["micro_batch"] * layout["accumulation"], 64
    tokens = torch.randint(0, 512, (rows, length))
    batch = Batch(tokens, tokens, torch.arange(length).expand(rows, -1))

    def step() -> None:
        engine.forward_backward(batch)
        engine.gradient_norm()
        engine.step(True)

    step()
    model_of_all, optimizers = engine.measured()
    with measure(model_of_all, *optimizers) as memory:
        step()
    with torch.autograd.profiler.profile() as profile:
        step()
    calls = {e.key.removeprefix("c10d::"): e.count for e in profile.key_averages()}
    return {"bytes": memory.bytes, "calls": {k: calls_of(k, calls) for k in SENT}}


# Of torch's names of its collectives; sums of losses and norms are all-reduces too.
SENT = {
    "all_gather": ("_allgather_base_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    "all_to_all": ("alltoall_base_",),
}


def calls_of(kind: str, calls: dict[str, int]) -> int:
    return sum(calls.get(name, 0) for name in SENT[kind])


REAL: dict[str, dict[str, Any]] = {
    "zero1": {"shard": 2, "sharding": "zero1"},
    "full_shard": {"shard": 2, "sharding": "full_shard"},
    "shard_grad_op": {"shard": 2, "sharding": "shard_grad_op", "compute": "bf16"},
    "tensor": {"tensor": 2},
    "context": {"context": 2, "activation_checkpointing": "full"},
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_rank_holds_and_calls_the_same(ranks: Ranks, name: str) -> None:
    layout = {**BASE, "accumulation": 1, **REAL[name]}
    found = ranks.run(2, really, layout, Layout(**layout).data)
    for rank, real in enumerate(found):
        told = dry_run(config_of(), Layout(**layout), llama(), rank)
        assert told.bytes["parameters"] == real["bytes"]["parameters"]
        assert told.bytes["optimizer"] == real["bytes"]["optimizer"]
        assert told.bytes["total"] == pytest.approx(real["bytes"]["total"], rel=0.12)
        assert {k: told.collectives.get(k, 0) for k in SENT} == real["calls"]


def test_gradients_of_the_micro_batches_before_are_there(ranks: Ranks) -> None:
    layout = {**BASE, **REAL["full_shard"]}
    for rank, real in enumerate(ranks.run(2, really, layout, 4)):
        told = dry(rank, **REAL["full_shard"]).bytes
        kinds = [kind for kind in KINDS if kind != "activations"]
        assert [told[k] for k in kinds] == [real["bytes"][k] for k in kinds]
        assert told["gradients"] > 0
        assert told["total"] == pytest.approx(real["bytes"]["total"], rel=0.12)


PIPELINE: dict[str, Any] = {"pipeline": 4, "pipeline_schedule": "1f1b", "accumulation": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"replicate": 64},
    "zero1": {"shard": 64, "sharding": "zero1", "compute": "bf16_pure"},
    "full_shard": {"shard": 64, "sharding": "full_shard", "compute": "fp8"},
    "hybrid_shard": {"shard": 8, "replicate": 8, "sharding": "hybrid_shard"},
    "low-bit states": {"shard": 64, "sharding": "full_shard", "optimizer_states": "int8"},
    "on the host": {
        "shard": 64, "sharding": "full_shard", "offload_parameters": "cpu",
        "offload_optimizer": "cpu", "activation_checkpointing": "offload",
    },
    "shard x context x tensor": {
        "shard": 16, "context": 2, "tensor": 2, "sharding": "full_shard", "compute": "bf16",
        "activation_checkpointing": "selective:operations",
    },
    "shard x tensor x pipeline": {
        "shard": 8, "tensor": 2, "sharding": "full_shard", "compute": "bf16", **PIPELINE,
    },
    "interleaved": {
        "shard": 8, "tensor": 2, "sharding": "shard_grad_op", "stages": 2, **PIPELINE,
        "pipeline_schedule": "interleaved_1f1b",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_64_ranks(name: str) -> None:
    """The last rank, which is the last in every group; and of stages the first one too."""
    staged = "pipeline" in LAYOUTS[name]
    for rank in (0, 63) if staged else (63,):
        found = dry(rank, llama(8 if staged else 2), **LAYOUTS[name])
        assert found.rank == rank
        assert found.parameters > 0
        assert found.bytes["total"] == sum(found.bytes[kind] for kind in KINDS)
        assert min(found.bytes[kind] for kind in KINDS if kind != "gradients") > 0
        assert found.collectives
        assert not dist.is_initialized()


def test_the_stages_hold_the_whole_model_together() -> None:
    layout = {"shard": 16, "sharding": "full_shard", **PIPELINE}
    held = sum(dry(rank, **layout).parameters for rank in (0, 16, 32, 48))
    assert held * 16 == sum(p.numel() for p in model_on_meta(llama()).parameters())


def test_checkpointing_saves_activations() -> None:
    layout: dict[str, Any] = {"shard": 64, "sharding": "full_shard"}
    full = dry(activation_checkpointing="full", **layout).bytes["activations"]
    assert full < 0.7 * dry(**layout).bytes["activations"]


def test_an_optimizer_in_the_backward_pass_leaves_no_gradients() -> None:
    alone = {"accumulation": 1, "micro_batch": 4}
    usual, early = dry(**alone).bytes, dry(optimizer_in_backward=True, **alone).bytes
    assert early["gradients"] == 0
    assert early["optimizer"] == usual["optimizer"]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"tensor": 16}, "parallel.tensor = 16.*8 attention heads"),
    "heads of a tensor rank": ({"tensor": 4, "context": 4}, "parallel.context = 4.*2 query heads"),
    "a stage too many": ({**PIPELINE, "pipeline": 9}, "9 stages for 8 layers"),
    "twice the stages": (
        {**PIPELINE, "pipeline_schedule": "interleaved_1f1b", "stages": 3},
        "12 stages for 8 layers",
    ),
    "too few micro batches": ({**PIPELINE, "accumulation": 3}, "3 micro batches"),
    "too many data ranks": ({"replicate": 128}, "leaves some of the 128 data ranks"),
    "the table": ({"shard": 2, "replicate": 2, "sharding": "full_shard"}, "hybrid_shard"),
    "another engine": ({"engine": "deepspeed", "shard": 2, "sharding": "zero1"}, "engine: torch"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_layout_is_found(name: str) -> None:
    layout, message = BROKEN[name]
    with pytest.raises(RequestError, match=message):
        dry(**layout)
    assert not dist.is_initialized()


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(RequestError, match="give 0 to 63"):
        dry(64, replicate=64)


def test_not_within_a_group() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(RequestError, match="one of a group"):
            dry(replicate=2)
    finally:
        dist.destroy_process_group()


# Of a model of 405B parameters; the last two are those of Llama 3 (arXiv:2407.21783, table 4).
SHARDED: dict[str, Any] = {
    "sharding": "full_shard", "compute": "bf16", "activation_checkpointing": "full",
}  # fmt: skip
STAGED: dict[str, Any] = {"pipeline_schedule": "1f1b", "accumulation": 16, **SHARDED}
LARGE: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 512": (8192, {"shard": 512, **SHARDED}),
    "shard 8 x context 8 x tensor 8": (
        131072, {"shard": 8, "context": 8, "tensor": 8, **SHARDED},
    ),
    "pipeline 8 x shard 8 x tensor 8": (
        8192, {"pipeline": 8, "shard": 8, "tensor": 8, **STAGED},
    ),
    "pipeline 8 (2 stages each) x shard 8 x tensor 8": (
        8192,
        {"pipeline": 8, "shard": 8, "tensor": 8, **STAGED, "stages": 2,
         "pipeline_schedule": "interleaved_1f1b"},
    ),
    "pipeline 8 x context 8 x tensor 8": (
        131072, {"pipeline": 8, "context": 8, "tensor": 8, **STAGED},
    ),
    "pipeline 16 x shard 128 x tensor 8": (
        8192, {"pipeline": 16, "shard": 128, "tensor": 8, **STAGED},
    ),
    "pipeline 16 x shard 8 x context 16 x tensor 8": (
        131072, {"pipeline": 16, "shard": 8, "context": 16, "tensor": 8, **STAGED},
    ),
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("name", LARGE)
def test_405b_is_built_within_a_minute(name: str) -> None:
    """Prints the rows of docs/large-worlds.md (see them with `pytest -rP`)."""
    length, values = LARGE[name]
    layout = Layout(**{**BASE, "accumulation": 1, **values})
    config = config_of(length, samples=layout.data * layout.accumulation)
    last = layout.world_size - 1
    for rank in (0, last) if layout.pipeline > 1 else (0,):
        began = time.process_time()  # one thread that waits for nothing, however busy the machine
        found = dry_run(config, layout, llama_405b(), rank)
        seconds = time.process_time() - began
        sizes = " | ".join(f"{found.bytes[k] / 2**30:.2f}" for k in (*KINDS, "total"))
        calls = ", ".join(f"{n} {kind}" for kind, n in sorted(found.collectives.items()))
        print(
            f"| {name} | {layout.world_size:,} | {length:,} | {rank:,} "
            f"| {found.parameters / 1e6:,.0f} M | {sizes} | {calls} | {seconds:.0f} |"
        )
        assert seconds < 60


@pytest.mark.soak
def test_qlora_of_70b_on_two_cards_of_24_gb() -> None:
    """Prints the table of docs/quantization.md (see it with `pytest -rP`): what lies on a card
    with weights and states on the host is what is left of the sum."""
    config = config_from_dict(
        {
            "model": {"pretrained": "llama-3-70b"},
            "adapter": {"kind": "lora", "rank": 8},
            "quantization": "nf4",
            "data": {"sources": [{"type": "alpaca", "path": "records"}], "sequence_length": 1024},
            "train": {"steps": 1, "global_batch_size": 2, "micro_batch_size": 1},
            "precision": {"compute": "bf16"},
        }
    )
    layout = Layout(
        1,
        1,
        shard=2,
        sharding="full_shard",
        compute="bf16",
        quantization="nf4",
        adapter="lora",
        activation_checkpointing="full",
        offload_parameters="cpu",
        offload_optimizer="cpu",
    )
    found = dry_run(config, layout, llama_70b())
    print({kind: f"{size / 2**30:.2f} GiB" for kind, size in found.bytes.items()})
    on_host = found.bytes["parameters"] + found.bytes["optimizer"]
    assert on_host < 20 * 2**30
    assert found.bytes["total"] - on_host < 24e9
