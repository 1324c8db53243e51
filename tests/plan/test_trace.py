"""What a trace foretells is what a step measures; small traces tell of deep models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from ranks import Ranks
from rostra.batch import Batch
from rostra.build import build_engine
from rostra.build.tuned import tune
from rostra.config import Config, config_from_dict
from rostra.events import Events
from rostra.hardware import Cluster, read_cluster, this_cluster
from rostra.layout import Layout
from rostra.memory import measure
from rostra.models.weights import SeededWeights, model_on_meta
from rostra.plan import trace
from rostra.plan.job import job_of
from rostra.plan.memory import MemoryModel
from rostra.plan.results import Memory
from rostra.plan.trace import traced

CPU = torch.device("cpu")
LENGTH, VOCABULARY = 128, 4096


def shape_of(layers: int = 4, **sizes: Any) -> PretrainedConfig:
    values = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 768, **sizes}
    return AutoConfig.for_model("llama", vocab_size=VOCABULARY, num_hidden_layers=layers, **values)


def config_of(layout: Layout) -> Config:
    tuned = layout.adapter != "none"
    return config_from_dict(
        {
            "model": {"pretrained": "base"} if tuned else {"architecture": "llama"},
            "data": {
                "sources": [{"type": "python_docs"}],
                "sequence_length": LENGTH,
                "isolate_documents": False,
                **({} if tuned else {"tokenizer": {"vocabulary": VOCABULARY}}),
            },
            "train": {
                "steps": 10,
                "global_batch_size": layout.micro_batch * layout.accumulation * layout.data,
                "micro_batch_size": layout.micro_batch,
            },
            "adapter": {"kind": layout.adapter},
            "quantization": {"kind": layout.quantization},
        }
    )


def layout_of(**values: Any) -> Layout:
    return Layout(**{"micro_batch": 2, "accumulation": 1, **values})


def measured(layout: Layout) -> int:
    """Bytes of this rank at the peak of a step after the first: the least of three, as gloo's
    threads may give back late what a collective took."""
    config, shape = config_of(layout), shape_of()
    model, weights = model_on_meta(shape), SeededWeights(shape, 0)
    if layout.adapter != "none":
        built = tune(model, weights, config)
        model, weights = built.model, built.weights
    engine = build_engine(config, layout, model, CPU, 10, Events(), weights)
    rows = layout.micro_batch * layout.accumulation
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH))
    batch = Batch(tokens, tokens, torch.arange(LENGTH).expand(rows, -1))

    def step() -> None:
        engine.forward_backward(batch)
        engine.gradient_norm()
        engine.step(True)

    step()
    whole, optimizers = engine.measured()
    totals = []
    for _ in range(3):
        with measure(whole, *optimizers, device=CPU) as memory:
            step()
        totals.append(memory.bytes["total"])
    engine.close()
    return min(totals)


PIPELINE = {"pipeline": 2, "pipeline_schedule": "1f1b", "accumulation": 4}
MEASURED: dict[str, dict[str, Any]] = {
    "one process": {"compute": "bf16"},
    "checkpointing": {"activation_checkpointing": "full", "accumulation": 3},
    "on the host": {"activation_checkpointing": "offload"},
    "8-bit states": {"optimizer_states": "int8"},
    "qlora": {"adapter": "lora", "quantization": "nf4", "compute": "bf16"},
    "zero1": {"shard": 2, "sharding": "zero1"},
    "full_shard": {"shard": 2, "sharding": "full_shard", "compute": "bf16", "accumulation": 2},
    "tensor": {"tensor": 2},
    "ring": {"context": 2, "context_method": "ring"},
    "1f1b": PIPELINE,
    "zero bubble, recomputed": {
        **PIPELINE, "pipeline_schedule": "zero_bubble", "stages": 2,
        "activation_checkpointing": "full",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_it_is_what_a_step_measures(ranks: Ranks, name: str) -> None:
    layout = layout_of(**MEASURED[name])
    alone = layout.world_size == 1
    found = [measured(layout)] if alone else ranks.run(layout.world_size, measured, layout)
    assert of(layout, shape_of()).live == pytest.approx(max(found), rel=0.01)


def of(layout: Layout, shape: PretrainedConfig, cluster: Cluster | None = None) -> Memory:
    return traced(job_of(config_of(layout), shape), layout, cluster or this_cluster())


DEEP: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (11, {"accumulation": 4}),
    "every third": (11, {"activation_checkpointing": "every:3"}),
    "full_shard": (
        11,
        {
            "shard": 8, "sharding": "full_shard", "accumulation": 2,
            "activation_checkpointing": "full",
        },
    ),
    "1f1b": (19, PIPELINE),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_small_depths_tell_of_large_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, values = DEEP[name]
    small = of(layout_of(**values), shape_of(layers))
    monkeypatch.setattr(trace, "WHOLE", 100)
    whole = of(layout_of(**values), shape_of(layers))
    assert small.live == pytest.approx(whole.live, rel=1e-3)
    assert {k: size for k, size in small.kinds.items() if size} == pytest.approx(
        {k: size for k, size in whole.kinds.items() if size}, rel=0.02
    )


# Of each schedule, stages of several sizes, and more micro batches than are traced.
STAGED: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline_schedule": "gpipe", "accumulation": 9},
    "1f1b": {"accumulation": 7, "shard": 2, "sharding": "full_shard", "compute": "bf16"},
    "interleaved_1f1b": {
        "pipeline_schedule": "interleaved_1f1b", "stages": 2, "accumulation": 8,
    },
    "zero_bubble": {"pipeline_schedule": "zero_bubble", "stages": 2, "accumulation": 8},
    "zero bubble, recomputed": {
        "pipeline_schedule": "zero_bubble", "accumulation": 8, "activation_checkpointing": "full",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STAGED)
def test_a_few_micro_batches_tell_of_a_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, shape = layout_of(**PIPELINE | {"pipeline": 4} | STAGED[name]), shape_of(9)
    small = of(layout, shape)
    # all ranks and micro batches, in the order in which the engine has them
    monkeypatch.setattr(trace._Trace, "smaller", lambda one: (one.layout, one.place))
    monkeypatch.setattr(trace, "replayed", lambda seen, _: seen)
    assert small.live == pytest.approx(of(layout, shape).live, rel=3e-3)


def test_a_gpu_holds_the_batch_too() -> None:
    layout = layout_of(micro_batch=4)
    here, there = of(layout, shape_of(2)), of(layout, shape_of(2), read_cluster("1xL4"))
    assert there.live - here.live >= 4 * LENGTH * 24
    assert there.source == "trace"


def test_on_a_gpu_dropout_of_attention_keeps_nothing() -> None:
    """Its kernel draws it again; the CPU's, which a trace runs, keeps scores for it."""
    layout, gpu, cpu = layout_of(), read_cluster("1xL4"), this_cluster()
    plain, drops = shape_of(), shape_of(attention_dropout=0.1)
    assert of(layout, drops, gpu).live == of(layout, plain, gpu).live
    assert of(layout, drops, cpu).live > of(layout, plain, cpu).live


def test_experts_keep_half_as_much_in_16_bits() -> None:
    """Where autocast alone casts: in a pipeline, of whole weights."""
    shape = AutoConfig.for_model(
        "mixtral", hidden_size=64, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=4, num_hidden_layers=2, num_local_experts=4, vocab_size=256,
    )  # fmt: skip

    def kept(compute: str) -> int:
        layout = layout_of(compute=compute, pipeline=2, pipeline_schedule="1f1b", accumulation=2)
        memory = traced(job_of(config_of(layout), shape), layout, read_cluster("2xL4"))
        return memory.kinds["activations"]

    assert kept("bf16") == kept("fp16") < 0.7 * kept("fp32")


def test_zero3_of_more_than_it_gathers_at_once_the_formulas_tell() -> None:
    layout = layout_of(engine="deepspeed", shard=8, sharding="full_shard", compute="bf16")
    wide = {"hidden_size": 2048, "intermediate_size": 8192}
    found = [of(layout, shape_of(n, **wide), read_cluster("8xA100-80GB")) for n in (4, 40)]
    assert [memory.source for memory in found] == ["trace", "formula"]
    assert min(found[1].kinds.values()) >= 0


@pytest.mark.parametrize("places", ["nvme nvme", "none nvme", "cpu cpu", "none cpu"])
def test_what_deepspeed_moves_off_a_gpu_the_formulas_tell(places: str) -> None:
    """A CPU is its own host, and nothing is written on a disk."""
    parameters, optimizer = places.split()
    layout = layout_of(
        engine="deepspeed", shard=2, sharding="full_shard",
        offload_parameters=parameters, offload_optimizer=optimizer,
    )  # fmt: skip
    shape, cluster = shape_of(), read_cluster("2xRTX-4090")
    found = of(layout, shape, cluster)
    assert found == MemoryModel(job_of(config_of(layout), shape), cluster)(layout)
    assert found.source == "formula"
