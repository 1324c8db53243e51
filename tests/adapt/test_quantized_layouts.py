"""A quantised base under every layout computes what it computes in one process."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor

from parallel.common import CPU, LENGTH, SAMPLES, VOCABULARY, config_of
from ranks import Ranks
from rostra.adapt.quantized import freeze_base, quantize_model
from rostra.adapt.quantized_weights import QuantizedWeights
from rostra.batch import Batch
from rostra.build import build_engine
from rostra.config.tuning import QuantizationTable
from rostra.events import Events
from rostra.layout import Layout
from rostra.memory import stored_tensors
from rostra.models import SeededWeights, model_on_meta, scratch_config
from rostra.pieces import Reader, cut
from rostra.train import train_step

STEPS = 5


class Adapted:
    """The weights of a model with peft's LoRA layers over those of its base."""

    def __init__(self, base: Reader, model: torch.nn.Module) -> None:
        self._base = base
        self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if "lora_" in n}

    def names(self) -> Iterable[str]:
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        own = self._shapes.get(name)
        return self._base.shape(name.replace(".base_layer.", ".")) if own is None else own

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if name not in self._shapes:
            return self._base.read(name.replace(".base_layer.", "."), offset, size)
        generator = torch.Generator().manual_seed(sum(name.encode()))
        return cut(torch.randn(self._shapes[name], generator=generator) * 0.1, offset, size)


def engine_of(kind: str, layout: Layout) -> Any:
    size = {"hidden_size": 32, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 72}
    section = {"preset": None, "architecture": "llama", "size": size}
    config = config_of(model=section, optimizer={"learning_rate": 1e-2})
    special = dict.fromkeys(("bos_token_id", "pad_token_id"), 0)
    shape = scratch_config(config.model, VOCABULARY, LENGTH, special)
    model = model_on_meta(shape)
    quantize_model(model, QuantizationTable(kind=kind))  # type: ignore[arg-type]
    weights: Reader = QuantizedWeights(SeededWeights(shape, 3), model)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    freeze_base(model, torch.bfloat16 if layout.compute == "bf16" else torch.float32)
    return build_engine(config, layout, model, CPU, 10, Events(), weights=Adapted(weights, model))


def batch_of(seed: int) -> Batch:
    tokens = torch.randint(
        0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    positions = torch.arange(LENGTH).repeat(SAMPLES, 1)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)


def run(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(kind, Layout(**{"accumulation": 1, **values}))
    at, ranks = engine.place
    rows = SAMPLES // ranks
    losses = []
    for step in range(STEPS):
        part = batch_of(step % 2).rows(at * rows, (at + 1) * rows)
        losses.append(train_step(engine, part).loss)
    engine.close()
    held = [p for stage in engine.stages for p in stage.parameters() if not p.is_floating_point()]
    return {
        "losses": losses,
        "bytes": sum(x.nbytes for p in held for x in stored_tensors(p)),
    }


@cache
def alone(kind: str, compute: str) -> dict[str, Any]:
    return run(kind, {"micro_batch": SAMPLES, "accumulation": 1, "compute": compute})


LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"shard": 2, "sharding": "full_shard", "micro_batch": 2, "accumulation": 2},
    "full, 4 ranks": {"shard": 4, "sharding": "full_shard", "micro_batch": 2},
    "hybrid": {"shard": 2, "replicate": 2, "sharding": "hybrid_shard", "micro_batch": 2},
    "grad_op": {"shard": 2, "sharding": "shard_grad_op", "micro_batch": 4},
    "offload": {
        "shard": 2,
        "sharding": "full_shard",
        "micro_batch": 4,
        "offload_parameters": "cpu",
        "offload_optimizer": "cpu",
    },
    "pipeline": {"pipeline": 2, "pipeline_schedule": "1f1b", "micro_batch": 2, "accumulation": 4},
    "pipeline x full": {
        "pipeline": 2,
        "pipeline_schedule": "1f1b",
        "shard": 2,
        "sharding": "full_shard",
        "micro_batch": 2,
        "accumulation": 2,
    },
    "zero3": {"shard": 2, "sharding": "full_shard", "micro_batch": 4, "engine": "deepspeed"},
    "checkpointing": {
        "shard": 2,
        "sharding": "full_shard",
        "micro_batch": 4,
        "activation_checkpointing": "full",
    },
    "operations": {
        "shard": 2,
        "sharding": "full_shard",
        "micro_batch": 4,
        "activation_checkpointing": "selective:operations",
    },
}


# int8 and bf16, where two micro batches round otherwise than one, for two layouts of the torch
# engine: as what the stored tensors travel decides, not the kind of layout
CASES = [(name, "fp32", "nf4", 1e-5) for name in LAYOUTS]
CASES += [(name, "bf16", "int8", 3e-3) for name in ("full", "offload", "zero3")]


@pytest.mark.parametrize(("name", "compute", "kind", "tolerance"), CASES)
def test_layouts_give_the_losses_of_one_process(
    ranks: Ranks, name: str, compute: str, kind: str, tolerance: float
) -> None:
    values = LAYOUTS[name]
    axes = {axis: values.get(axis, 1) for axis in ("replicate", "shard", "pipeline")}
    expected = alone(kind, compute)
    assert expected["losses"][-1] < expected["losses"][0] - 0.03
    each = ranks.run(prod(axes.values()), run, kind, {**values, "compute": compute})
    for found in each:
        apart = [abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True)]
        assert max(apart) < tolerance, apart
    held = sum(found["bytes"] for found in each)
    assert held == expected["bytes"] * axes["replicate"]  # no rank holds more than its part
