"""What the tests of layouts share: tiny models, batches, and training on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from rostra.batch import IGNORE, Batch
from rostra.build import build_engine
from rostra.config import config_from_dict
from rostra.config.schema import ModelSection
from rostra.events import Events
from rostra.layout import Layout
from rostra.models import create_model, scratch_config
from rostra.parallel import TorchEngine
from rostra.train import train_step

CPU = torch.device("cpu")
VOCABULARY, LENGTH, SAMPLES = 98, 16, 8


def config_of(**sections: Any) -> Any:
    values: dict[str, Any] = {
        "model": {"preset": "tiny"},
        "data": {
            "sources": [{"type": "python_docs"}],
            "tokenizer": {"vocabulary": 300},
            "sequence_length": LENGTH,
        },
        "train": {"steps": 10, "global_batch_size": SAMPLES, "loss_chunk": 24},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup": 0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return config_from_dict(values)


def model_of(
    architecture: str,
    layers: int = 4,
    attention: str | None = None,
    vocabulary: int = VOCABULARY,
    **sizes: Any,
) -> PreTrainedModel:
    if architecture == "qwen3_moe":
        return mixture(layers)
    size: dict[str, Any] = {"hidden_size": 32, "layers": layers, "heads": 4}
    size["intermediate_size"] = 64
    if architecture != "gpt2":
        size["kv_heads"] = 2
    section = ModelSection.model_validate({"architecture": architecture, "size": size | sizes})
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return create_model(scratch_config(section, vocabulary, LENGTH, special), 1, attention)


def mixture(layers: int) -> PreTrainedModel:
    shape = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32)


def batch_of(seed: int = 0, samples: int = SAMPLES) -> Batch:
    """Samples with very unequal numbers of targets, and documents that end within them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    positions = torch.arange(LENGTH).repeat(samples, 1)
    for row in range(samples):
        labels[row, : row * LENGTH // samples] = IGNORE
        border = 3 + row
        positions[row, border:] -= border
    return Batch(tokens[:, :-1].contiguous(), labels, positions)


def part_of(batch: Batch, engine: TorchEngine) -> Batch:
    """The samples of this rank: as equal in number as they can be."""
    rank, ranks = engine.mesh.coordinate("replicate", "shard"), engine.layout.data
    size, more = divmod(len(batch), ranks)
    first = rank * size + min(rank, more)
    return batch.rows(first, first + size + (rank < more))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parameters_of(engine: TorchEngine) -> dict[str, Tensor]:
    """All parameters, whole, on every rank."""
    own = {
        stage.aliases.get(name, name): whole(p.detach()).clone()
        for stage in engine.stages
        for name, p in stage.model.named_parameters()
    }
    if not dist.is_initialized():
        return own
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: p for found in everyone for name, p in found.items()}


def run(
    architecture: str,
    layout: dict[str, Any],
    steps: int = 3,
    samples: int = SAMPLES,
    **sections: Any,
) -> dict[str, Any]:
    """Losses, norms and final parameters of some steps under a layout."""
    engine = build_engine(
        config_of(train={"global_batch_size": samples}, **sections),
        Layout(**layout),
        model_of(architecture),
        CPU,
        10,
        Events(),
    )
    outcomes = []
    for step in range(steps):
        batch = batch_of(step, samples)
        outcomes.append(train_step(engine, part_of(batch, engine)))
    evaluated = engine.forward(batch_of(99, 4))
    return {
        "loss": [o.loss for o in outcomes],
        "norm": [o.gradient_norm for o in outcomes],
        "tokens": [o.tokens for o in outcomes],
        "parameters": parameters_of(engine),
        "evaluated": evaluated,
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest differences of two results of `run`, norms relatively."""

    def largest(key: str) -> float:
        pairs = zip(one[key], other[key], strict=True)
        return max(abs(a - b) / (abs(a) if key == "norm" else 1) for a, b in pairs)

    assert one["parameters"].keys() == other["parameters"].keys()
    weights = [
        float((p - other["parameters"][name]).abs().max()) for name, p in one["parameters"].items()
    ]
    return {"loss": largest("loss"), "norm": largest("norm"), "parameters": max(weights)}
