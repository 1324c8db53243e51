"""Adapters beside frozen, perhaps quantised, bases: under every layout the losses, gradients
and adapters of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from parallel.common import (
    CPU,
    LENGTH,
    VOCABULARY,
    batch_of,
    config_of,
    difference,
    part_of,
    whole,
)
from ranks import Ranks
from rostra.adapt import virtual_ids
from rostra.batch import IGNORE, Batch
from rostra.build import build_engine
from rostra.build.tuned import tune
from rostra.config.schema import ModelSection
from rostra.events import Events
from rostra.layout import Layout
from rostra.models import SeededWeights, model_on_meta, scratch_config
from rostra.train import train_step

VIRTUAL = 3
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 4},
    "dora": {"kind": "lora", "rank": 4, "dora": True, "targets": ["q_proj", "v_proj", "down_proj"]},
    "ia3": {"kind": "ia3"},
    "ends": {
        "kind": "lora",
        "rank": 4,
        "dropout": 0.2,
        "targets": ["q_proj", "embed_tokens", "lm_head"],
    },
    "ends, tied": {"kind": "lora", "rank": 4, "targets": ["v_proj", "embed_tokens", "lm_head"]},
    "head": {"kind": "lora", "rank": 4, "dropout": 0.2, "targets": ["lm_head"]},
    "lora, noise and dropout": {
        "kind": "lora",
        "rank": 4,
        "dropout": 0.2,
        "lora_plus_ratio": 4,
    },
    "prompt": {"kind": "prompt", "virtual_tokens": VIRTUAL},
    "prefix": {"kind": "prefix", "virtual_tokens": VIRTUAL},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"replicate": 2}),
    "zero1": (2, {"shard": 2, "sharding": "zero1"}),
    "full_shard": (2, {"shard": 2, "sharding": "full_shard"}),
    "full_shard on the host": (
        2,
        {
            "shard": 2,
            "sharding": "full_shard",
            "offload_parameters": "cpu",
            "offload_optimizer": "cpu",
        },
    ),
    "pipeline": (2, {"pipeline": 2, "pipeline_schedule": "1f1b"}),
    "pipeline x full_shard": (
        4,
        {"pipeline": 2, "pipeline_schedule": "1f1b", "shard": 2, "sharding": "full_shard"},
    ),
    "context": (2, {"context": 2, "sharding": "full_shard"}),
    "zero3": (2, {"engine": "deepspeed", "shard": 2, "sharding": "full_shard"}),
    "full_shard, checkpointing": (
        2,
        {"shard": 2, "sharding": "full_shard", "activation_checkpointing": "full"},
    ),
}  # fmt: skip


def shape_of(layers: int = 4, tied: bool = False) -> Any:
    size = {
        "hidden_size": 64,
        "layers": layers,
        "heads": 4,
        "kv_heads": 2,
        "intermediate_size": 128,
        "tie_embeddings": tied,
    }
    section = ModelSection.model_validate({"architecture": "llama", "size": size})
    special: dict[str, int | None] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return scratch_config(section, VOCABULARY, LENGTH, special)


def weighted(batch: Batch, virtual: int) -> Batch:
    """With labels that count unequally, and virtual tokens at each sample's beginning."""
    weights = torch.where(batch.labels == IGNORE, 0.0, 0.25 + batch.labels.remainder(3) / 2)
    inputs = batch.input_ids.clone()
    if virtual:
        inputs[:, :virtual] = virtual_ids(virtual)
    return Batch(inputs, batch.labels, batch.position_ids, weights)


def run_tuned(
    kind: str, quantized: str, layout: dict[str, Any], steps: int = 3, compute: str = "fp32"
) -> dict[str, Any]:
    config = config_of(
        model={"preset": None, "pretrained": "unused"},
        data={"sources": [{"type": "completion", "path": "unused"}]},
        adapter=ADAPTERS[kind],
        quantization={"kind": quantized},
        precision={"compute": compute},
        train={"global_batch_size": 8, "neftune_alpha": 5.0 if "noise" in kind else None},
    )
    shape = shape_of(tied="tied" in kind)
    model: PreTrainedModel = model_on_meta(shape)
    built = tune(model, SeededWeights(shape, 1), config)
    values = {"micro_batch": 2, "accumulation": 4, "compute": compute, **layout}
    values |= {"adapter": ADAPTERS[kind]["kind"], "quantization": quantized}
    if "replicate" in layout or layout.get("shard"):
        values["accumulation"] = 2
    engine = build_engine(config, Layout(**values), model, CPU, 10, Events(), built.weights)
    virtual = VIRTUAL if kind in ("prompt", "prefix") else 0
    outcomes = []
    for step in range(steps):
        batch = weighted(batch_of(step), virtual)
        outcomes.append(train_step(engine, part_of(batch, engine)))
    names = [name for group in engine.state()[0] for name in group]
    assert all(name.startswith(("model/", "optimizer/", "master/")) for name in names)
    assert not any("packed" in name or "base_layer" in name for name in names)
    own = {
        name: whole(p.detach()).clone()
        for stage in engine.stages
        for name, p in stage.model.named_parameters()
        if p.requires_grad and not hasattr(p, "ds_id")  # DeepSpeed's are in pieces
    }
    engine.close()
    return {
        "loss": [o.loss for o in outcomes],
        "norm": [o.gradient_norm for o in outcomes],
        "parameters": own,
    }


_ALONE: dict[Any, dict[str, Any]] = {}


def alone(kind: str, quantized: str, compute: str = "fp32") -> dict[str, Any]:
    key = (kind, quantized, compute)
    if key not in _ALONE:
        _ALONE[key] = run_tuned(kind, quantized, {"micro_batch": 8, "accumulation": 1}, 3, compute)
    return _ALONE[key]


CASES = [
    *(("lora", "nf4", name) for name in LAYOUTS),
    ("lora", "none", "full_shard"),
    ("lora", "int8", "full_shard"),
    ("lora", "fp4", "pipeline"),
    ("dora", "nf4", "full_shard"),
    ("ia3", "none", "full_shard"),
    *(("ends", "none", name) for name in ("ddp", "full_shard", "pipeline x full_shard", "zero3")),
    ("ends", "nf4", "context"),
    ("ends, tied", "none", "pipeline"),
    ("ends, tied", "none", "full_shard"),
    ("head", "none", "pipeline"),
    ("prompt", "nf4", "full_shard"),
    ("prompt", "none", "pipeline"),
    ("prompt", "none", "context"),
    ("prefix", "none", "full_shard"),
    ("prefix", "none", "pipeline"),
    ("prefix", "none", "context"),
    ("lora, noise and dropout", "nf4", "full_shard"),
    ("lora, noise and dropout", "none", "pipeline"),
]


@pytest.mark.parametrize(("kind", "quantized", "layout"), CASES)
def test_adapters_train_alike(kind: str, quantized: str, layout: str, ranks: Ranks) -> None:
    one = alone(kind, quantized)
    assert one["loss"][-1] != one["loss"][0]
    count, values = LAYOUTS[layout]
    results = ranks.run(count, run_tuned, kind, quantized, values)
    together = {name: p for found in results for name, p in found["parameters"].items()}
    for found in results:
        found["parameters"] = together
        if not together:  # of DeepSpeed's, the later losses tell
            found["parameters"] = one["parameters"]
        apart = difference(one, found)
        assert apart["loss"] < 1e-5, apart
        assert apart["norm"] < 1e-4, apart
        assert apart["parameters"] < 1e-4, apart
