"""What the planner's models keep from one layout for others changes none of their answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from rostra.config import config_from_dict
from rostra.hardware.catalogue import read_cluster
from rostra.plan.job import Job, job_of
from rostra.plan.memory import MemoryModel
from rostra.plan.memory.growth import at, highest, highest_of
from rostra.plan.space import Space
from rostra.plan.time import TimeModel

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6, "num_key_value_heads": 2},
    "gpt2": {"n_layer": 4},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 16, "num_key_value_heads": 2},
}


def job(family: str, **sections: Any) -> Job:
    sizes: dict[str, Any] = {"vocab_size": 500, "tie_word_embeddings": family != "llama"}
    if family == "gpt2":
        sizes |= {"n_embd": 64, "n_head": 4}
    else:
        sizes |= {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    shape = AutoConfig.for_model(family, **sizes, **SHAPES[family])
    values: dict[str, Any] = {
        "model": {"pretrained": "somewhere"},
        "data": {"sources": [{"type": "text", "path": "x"}], "sequence_length": 64},
        "train": {"steps": 10, "global_batch_size": 12, "loss_chunk": 100},
    }
    for name, found in sections.items():
        values[name] = {**values.get(name, {}), **found}
    return job_of(config_from_dict(values), shape)


@pytest.mark.parametrize(("family", "hardware", "sections"), [
    ("llama", "8xH100", {}),
    ("llama", "2xA100", {"precision": {"compute": "bf16_pure"}, "train": {"compile": True}}),
    ("gpt2", "4xA100", {"adapter": {"kind": "lora"}, "quantization": {"kind": "nf4"}}),
    ("gemma3_text", "2x2xL4", {"memory": {"optimizer_states": "int8"}}),
    ("gemma3_text", "4xL4", {"data": {"isolate_documents": True}}),
])  # fmt: skip
def test_what_is_kept_for_others_changes_nothing(
    family: str, hardware: str, sections: dict[str, Any]
) -> None:
    asked, cluster = job(family, **sections), read_cluster(hardware)
    layouts, draw = list(Space(asked, cluster)), random.Random(0)
    memory, time = MemoryModel(asked, cluster), TimeModel(asked, cluster)
    for layout in draw.sample(layouts, min(len(layouts), 2000)):
        memory(layout), time(layout)
    for layout in draw.sample(layouts, min(len(layouts), 60)):
        assert memory(layout) == MemoryModel(asked, cluster)(layout), layout
        assert time(layout) == TimeModel(asked, cluster)(layout), layout


@given(
    st.lists(st.builds(complex, st.integers(-50, 50), st.integers(-5, 20)), min_size=1),
    st.integers(0, 200),
)
def test_the_highest_line_is_kept(lines: list[complex], tokens: int) -> None:
    most = max(at(line, tokens) for line in lines)
    assert max(at(line, tokens) for line in highest(lines)) == most
    kept = highest_of(range(len(lines)), lines)
    assert max(at(lines[i], tokens) for i in kept) == most
    assert kept == sorted(kept)
    assert all(lines.index(lines[i]) == i for i in kept)  # of equals the first
