"""A space knows its members without listing them."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from transformers import AutoConfig

from rostra.config import config_from_dict
from rostra.hardware.catalogue import read_cluster
from rostra.layout import AXES, Adapter, Compute, Layout, Schedule, Sharding
from rostra.plan.job import Job, job_of
from rostra.plan.space import CHECKPOINTING, Limits, Space

OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("micro_batch", "accumulation", "stages", *AXES), (1, 2, 3, 4, 12)),
    "engine": ("torch", "deepspeed"),
    "sharding": get_args(Sharding),
    "context_method": ("ulysses", "ring"),
    "pipeline_schedule": get_args(Schedule),
    "activation_checkpointing": (*CHECKPOINTING, "every:3"),
    "offload_parameters": ("none", "cpu", "nvme"),
    "offload_optimizer": ("none", "cpu", "nvme"),
    "compute": get_args(Compute),
    "reduction": ("fp32", "bf16"),
    "quantization": ("none", "nf4"),
    "adapter": get_args(Adapter),
    "optimizer_states": ("fp32", "int8"),
    "optimizer_in_backward": (False, True),
    "compile": (False, True),
}


def job(**sections: Any) -> Job:
    values: dict[str, Any] = {
        "model": {"pretrained": "somewhere"},
        "data": {"sources": [{"type": "text", "path": "x"}], "sequence_length": 64},
        "train": {"steps": 10, "global_batch_size": 12},
    }
    for name, found in sections.items():
        values[name] = {**values.get(name, {}), **found}
    shape = AutoConfig.for_model(
        "llama", vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return job_of(config_from_dict(values), shape)


@pytest.mark.parametrize(("sections", "hardware", "limits"), [
    ({}, "4xA100", Limits()),
    ({"adapter": {"kind": "lora"}, "quantization": {"kind": "nf4"}}, "2x2xL4", Limits(thin=True)),
    ({"parallel": {"tensor": 2, "sharding": "full_shard"}}, "4xA100", Limits()),
    ({"train": {"micro_batch_size": 3}}, "4xL4", Limits(ranks=4, engines=("torch",), nvme=False)),
])  # fmt: skip
def test_a_member_is_what_is_listed(
    sections: dict[str, Any], hardware: str, limits: Limits
) -> None:
    space = Space(job(**sections), read_cluster(hardware), limits)
    listed = list(space)
    members, draw = set(listed), random.Random(0)
    assert set(OTHERS) == {f.name for f in fields(Layout)}
    near = set()
    for layout in draw.sample(listed, min(len(listed), 100)):
        assert layout in space
        near |= {
            replace(layout, **{name: value}) for name, values in OTHERS.items() for value in values
        }
    assert near - members
    for layout in near:
        assert (layout in space) == (layout in members), layout
