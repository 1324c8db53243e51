"""The files of the guides, as they are: what they become, and that they train, with a tiny model
and a few records in place of what their hub names stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rostra.config import config_from_dict, read_axolotl
from rostra.data import train_tokenizer
from rostra.models import create_model
from support import REPOSITORY, ended, rostra, start

GUIDES = REPOSITORY / "examples" / "guides"

# What Axolotl holds where a file says nothing, and Rostra does not.
UNSAID: dict[str, Any] = {
    "data": {"held_out": 0.0, "long_examples": "drop", "packing": "none"},
    "optimizer": {"name": "adamw", "weight_decay": 0.0, "beta2": 0.999},
    "schedule": {"name": "cosine", "final_fraction": 0.0, "warmup": "3%"},
}
SQUAD: dict[str, Any] = {
    "run": {"output": "./models/Llama3_squad"},
    "model": {"pretrained": "unsloth/Meta-Llama-3.1-8B-Instruct"},
    "data": {
        **UNSAID["data"],
        "sources": [
            {
                "type": "mapping",
                "path": "TheFuzzyScientist/squad-for-llms",
                "system_prompt": "Read the following context and concisely answer my question.",
                "field_system": "system",
                "field_instruction": "question",
                "field_input": "context",
                "field_output": "output",
                "prompt": "<|user|>\n {input} {instruction} </s>\n<|assistant|>",
                "prompt_without_input": "<|user|> {instruction} </s>\n<|assistant|>",
            }
        ],
        "sequence_length": 2048,
    },
    "train": {"epochs": 4.0, "micro_batch_size": 4, "global_batch_size": 4},
    "optimizer": {**UNSAID["optimizer"], "learning_rate": 2e-4},
    "schedule": UNSAID["schedule"],
    "precision": {"compute": "auto"},
    "adapter": {
        "kind": "lora", "rank": 32, "alpha": 16, "dropout": 0.05, "targets": "all-linear"
    },
    "memory": {"optimizer_states": "int8", "activation_checkpointing": "full"},
    "monitor": {"log_every": 1},
}  # fmt: skip
BECOME: dict[str, tuple[int, dict[str, Any]]] = {
    "squad-lora": (1, SQUAD),
    "squad-lora-zero1": (
        2,
        {
            **SQUAD,
            "train": {"epochs": 4.0, "micro_batch_size": 4, "global_batch_size": 8},
            "parallel": {"engine": "deepspeed", "deepspeed": str(GUIDES / "zero1.json")},
            "memory": {"optimizer_states": "fp32", "activation_checkpointing": "full"},
        },
    ),
    "longalpaca-qlora-fsdp": (
        2,
        {
            "run": {"output": "./models/llama70B-LongAlpaca"},
            "model": {"pretrained": "casperhansen/llama-3-70b-fp16"},
            "data": {
                **UNSAID["data"],
                "sources": [{"type": "alpaca", "path": "Yukang/LongAlpaca-12k"}],
                "sequence_length": 1024,
                "tokenizer": {"special": {"pad_token": "<|end_of_text|>"}},
            },
            "train": {"epochs": 1.0, "micro_batch_size": 1, "global_batch_size": 2},
            "optimizer": {**UNSAID["optimizer"], "learning_rate": 2e-4},
            "schedule": UNSAID["schedule"],
            "adapter": {"kind": "lora"},
            "quantization": {"kind": "nf4"},
            "parallel": {"sharding": "full_shard"},
            "memory": {"offload": {"parameters": "cpu", "optimizer": "cpu"}},
        },
    ),
    "llama2-lora": (
        1,
        {
            "run": {"output": "./model-out"},
            "model": {"pretrained": "meta-llama/Llama-2-7b-hf"},
            "data": {
                **UNSAID["data"],
                "sources": [{"type": "alpaca", "path": "tatsu-lab/alpaca"}],
                "sequence_length": 1024,
            },
            "train": {"epochs": 1.0, "micro_batch_size": 1, "global_batch_size": 1},
            "optimizer": {**UNSAID["optimizer"], "learning_rate": 2e-4},
            "schedule": UNSAID["schedule"],
            "adapter": {
                "kind": "lora", "rank": 8, "alpha": 32, "dropout": 0.05,
                "targets": ["q_proj", "v_proj"],
            },
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BECOME)
def test_a_guides_file_becomes_this_config(name: str) -> None:
    ranks, wanted = BECOME[name]
    found = read_axolotl(GUIDES / f"{name}.yml", ranks)
    assert found.config == wanted
    config_from_dict(wanted)


def test_these_are_all_files_of_the_guides() -> None:
    assert {path.stem for path in GUIDES.glob("*.yml")} == BECOME.keys()


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama with its tokenizer, and records that have the keys of both datasets."""
    folder = tmp_path_factory.mktemp("guides")
    said = "a quiet harbour and small boats"
    records = [
        {"instruction": f"Name harbour {n}.", "question": f"Which harbour is {n}?",
         "context": said, "input": "", "output": f"The {n}th of the quiet ones."}
        for n in range(8)
    ]  # fmt: skip
    data = folder / "records.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    shape = AutoConfig.for_model(
        "llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, vocab_size=300, bos_token_id=0,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    tokenizer = train_tokenizer(iter([json.dumps(record) for record in records]), 299)
    tokenizer.add_tokens("<|end_of_text|>", special_tokens=True)  # as Llama 3 has it
    create_model(shape, seed=1).to(torch.bfloat16).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder / "base", data


@pytest.mark.parametrize("name", BECOME)
def test_a_guides_file_trains(name: str, stand_ins: tuple[Path, Path], tmp_path: Path) -> None:
    ranks, wanted = BECOME[name]
    base, data = stand_ins
    changes = {"model.pretrained": base, "data.sources.0.path": data, "run.output": tmp_path / "r"}
    words = [w for key, value in changes.items() for w in ("--set", f"{key}={value}")]
    asked = ("train", GUIDES / f"{name}.yml", *words, "--json")
    if ranks == 1:
        done = rostra(*asked, cwd=tmp_path)
    else:
        done = ended(start(*asked, "--workers", str(ranks), cwd=tmp_path))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    size = wanted["train"]["global_batch_size"]
    assert summary["steps"] == wanted["train"]["epochs"] * 8 / size
    assert 0 < summary["trainable_parameters"] < summary["parameters"]
    assert (tmp_path / "r" / "adapter" / "adapter_model.safetensors").is_file()
    assert "an Axolotl file, for" in done.stderr
