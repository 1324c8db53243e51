"""Axolotl's files: every key has an answer, and what is translated is the same run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from rostra.config import Config, Translation, read_axolotl, read_config
from rostra.config.axolotl import translate
from rostra.config.axolotl_datasets import DATASET_RULES, MAPPING_RULES, TEMPLATES
from rostra.config.axolotl_keys import ALIASES, DEFAULTS, KEYS, SLIPS
from rostra.config.axolotl_layout import FSDP_RULES
from rostra.config.axolotl_model import SPECIAL_RULES
from rostra.data.templates import TEMPLATES as KNOWN_TEMPLATES
from rostra.errors import RequestError
from support import rostra


def _lists() -> dict[str, set[str]]:
    text = (Path(__file__).parent / "axolotl_keys.txt").read_text()
    blocks = (block.split("]\n", 1) for block in text.split("\n[")[1:])
    return {name: set(keys.split()) for name, keys in blocks}


SCHEMA = _lists()
LEAST: dict[str, Any] = {
    "base_model": "model",
    "datasets": [{"path": "data.jsonl", "type": "alpaca"}],
    "learning_rate": 1e-4,
}


def write(folder: Path, values: dict[str, Any] | str) -> Path:
    path = folder / "axolotl.yml"
    if isinstance(values, dict):
        out = io.StringIO()
        YAML(typ="safe", pure=True).dump({**LEAST, **values}, out)
        values = out.getvalue()
    path.write_text(values)
    return path


def config_of(folder: Path, ranks: int = 1, **values: Any) -> Config:
    return read_config(write(folder, values), ranks=ranks)


def found_in(config: Config, path: str) -> Any:
    value: Any = config.model_dump()
    for step in path.split("."):
        value = value[int(step) if step.isdigit() else step]
    return value


def test_every_key_of_axolotl_is_known() -> None:
    tables = {
        "top": KEYS.keys() | SLIPS.keys() | ALIASES.keys(),
        "dataset": DATASET_RULES.keys(),
        "type": MAPPING_RULES.keys(),
        "fsdp_config": FSDP_RULES.keys() | {f"fsdp_{key}" for key in FSDP_RULES},
        "special_tokens": SPECIAL_RULES.keys(),
    }
    assert [(name, SCHEMA[name] - known) for name, known in tables.items()] == [
        (name, set()) for name in tables
    ]
    assert len(SCHEMA["top"]) > 450
    # what Axolotl's own examples say that Axolotl does not know
    assert SCHEMA["examples"] - tables["top"] == {"context_parapllel_size", "torch_dtype"}
    assert SCHEMA["examples_fsdp"] - tables["fsdp_config"] == set()
    assert set(SLIPS.values()) | set(ALIASES.values()) | set(DEFAULTS) <= KEYS.keys()
    assert set(TEMPLATES) == set(KNOWN_TEMPLATES)


VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        2,
        0.5,
        -1,
        "auto",
        "x",
        "lora",
        "",
        [],
        ["x", {}],
        {},
        {"x": [1]},
        {"user": 1, "role": None},
    ]
)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(KEYS) + sorted(SLIPS) + ["nonsense"]), VALUES),
    st.dictionaries(st.sampled_from(sorted(DATASET_RULES)), VALUES),
    st.dictionaries(st.sampled_from(sorted(FSDP_RULES)), VALUES),
)
def test_whatever_is_given_no_key_is_dropped(
    top: dict[str, Any], dataset: dict[str, Any], fsdp: dict[str, Any]
) -> None:
    values = {**top, "datasets": [dataset], "fsdp_config": fsdp}
    lines = {(key,): number for number, key in enumerate(values, 1)}
    found = translate(values, lines, "axolotl.yml")
    answered = {a.key for kind in (found.translated, found.needless, found.refused) for a in kind}
    assert values.keys() <= {key.split(".")[0] for key in answered}
    assert {f"datasets.0.{key}" for key in dataset} <= answered
    assert {f"fsdp_config.{key}" for key in fsdp} <= answered
    json.dumps(found.to_dict())


CHAT = {"path": "chats.jsonl", "type": "chat_template"}
TRANSLATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"train.epochs": 1, "optimizer.beta2": 0.999, "optimizer.weight_decay": 0,
          "schedule.final_fraction": 0, "data.held_out": 0, "data.packing": "none",
          "run.output": "./model-out", "schedule.warmup": "3%"}),
    ({"max_steps": 50, "num_epochs": 3}, {"train.steps": 50, "train.epochs": None}),
    ({"max_seq_length": 64, "sample_packing": True}, {"data.sequence_length": 64,
                                                      "data.packing": "best_fit"}),
    ({"micro_batch_size": 2, "gradient_accumulation_steps": 3},
     {"train.micro_batch_size": 2, "train.global_batch_size": 6}),
    ({"micro_batch_size": 2, "batch_size": 8}, {"train.global_batch_size": 8}),
    ({"optimizer": "paged_adamw_8bit"}, {"memory.optimizer_states": "paged_int8"}),
    ({"optimizer": "muon"}, {"optimizer.name": "muon", "optimizer.matrix_learning_rate": 1e-4}),
    ({"lr_scheduler": "constant_with_warmup", "warmup_steps": 7},
     {"schedule.name": "constant", "schedule.warmup": 7}),
    ({"lr_scheduler": "constant"}, {"schedule.name": "constant", "schedule.warmup": 0}),
    ({"cosine_min_lr_ratio": 0.1, "warmup_ratio": 0.05},
     {"schedule.final_fraction": 0.1, "schedule.warmup": "5%"}),
    ({"lr_scheduler": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 9}},
     {"schedule.name": "wsd", "schedule.decay": 9}),
    ({"val_set_size": 0.1, "eval_steps": 0.25, "save_steps": 10, "max_steps": 40},
     {"evaluate.every": 10, "checkpoint.every": 10, "data.held_out": 0.1}),
    ({"bf16": True, "fp16": None}, {"precision.compute": "bf16"}),
    ({"bf16": False}, {"precision.compute": "fp32"}),
    ({"fp16": True, "bf16": "auto"}, {"precision.compute": "fp16"}),
    ({"bfloat16": True, "bf16": False}, {"precision.compute": "bf16_pure"}),
    ({"gradient_checkpointing": True, "activation_offloading": True},
     {"memory.activation_checkpointing": "offload"}),
    ({"gradient_checkpointing": "offload"}, {"memory.activation_checkpointing": "offload"}),
    ({"gradient_checkpointing": True, "selective_checkpointing": {"save": ["attention"]}},
     {"memory.activation_checkpointing": "selective:mlp"}),
    ({"adapter": "qlora", "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4",
                                                "bnb_4bit_use_double_quant": False}},
     {"quantization.kind": "fp4", "quantization.double": False, "adapter.kind": "lora"}),
    ({"adapter": "lora", "load_in_8bit": True, "peft_use_dora": True, "loraplus_lr_ratio": 16,
      "lora_target_linear": True, "lora_target_modules": ["q_proj"]},
     {"quantization.kind": "int8", "adapter.dora": True, "adapter.lora_plus_ratio": 16,
      "adapter.targets": "all-linear"}),
    ({"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["q_proj", "lm_head"]},
     {"adapter.targets": ("all-linear", "lm_head")}),
    ({"adapter": "lora", "lora_target_linear": True, "lora_target_modules": "lm_head"},
     {"adapter.targets": ("all-linear", "lm_head")}),
    ({"adapter": "lora", "lora_target_modules": ["q_proj", "embed_tokens"]},
     {"adapter.targets": ("q_proj", "embed_tokens")}),
    ({"lora_r": 8, "adapter": None}, {"adapter.kind": "none"}),
    ({"special_tokens": {"pad_token": "<p>", "additional_special_tokens": ["<a>"]},
      "tokens": ["<b>"]},
     {"data.tokenizer.special": {"pad_token": "<p>"}, "data.tokenizer.added": ("<a>", "<b>")}),
    ({"deepspeed": "deepspeed_configs/zero2.json"},
     {"parallel.engine": "deepspeed", "parallel.sharding": "shard_grad_op",
      "memory.offload.optimizer": "cpu", "memory.offload.parameters": "auto"}),
    ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
     {"parallel.sharding": "hybrid_shard"}),
    ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False, "offload_params": True,
                                         "activation_checkpointing": True}},
     {"parallel.sharding": "shard_grad_op", "memory.offload.parameters": "cpu",
      "memory.offload.optimizer": "cpu", "memory.activation_checkpointing": "full"}),
    ({"dp_shard_size": 2, "dp_replicate_size": 2, "fsdp_config": {"state_dict_type": None}},
     {"parallel.shard": 2, "parallel.replicate": 2, "parallel.sharding": "hybrid_shard"}),
    ({"sequence_parallel_degree": 2}, {"parallel.context": 2, "parallel.context_method": "ring"}),
    ({"eager_attention": True}, {"model.attention": "eager"}),
    ({"datasets": [{**CHAT, "field_messages": "talk", "train_on_eos": "turn",
                    "message_property_mappings": {"role": "from", "content": "value"},
                    "roles": {"assistant": ["bot"], "user": ["human"]}, "ds_type": "json",
                    "roles_to_train": ["bot", "gpt"], "chat_template": "chatml"}]},
     {"data.sources.0.messages": "talk", "data.sources.0.role": "from",
      "data.sources.0.roles": {"bot": "assistant", "human": "user"},
      "data.sources.0.train_roles": ("assistant",), "data.chat_template": "chatml"}),
    ({"datasets": [{**CHAT, "train_on_eos": "all", "message_field_training": "training",
                    "message_property_mappings": {"tool_calls": "tool_calls"}}],
      "chat_template": "mistral_v7_tekken"},
     {"data.sources.0.train_ends": "all", "data.sources.0.message_weight": "training",
      "data.chat_template": "mistral_v7_tekken"}),
    ({"adapter": "lora", "lora_target_modules": r".*layers\.\d+\.mlp\.\w+"},
     {"adapter.targets": r".*layers\.\d+\.mlp\.\w+"}),
    ({"adapter": "lora", "lora_target_modules": "q_proj"}, {"adapter.targets": ("q_proj",)}),
    ({"fsdp": ["hybrid_shard"], "bf16": True, "fsdp_config":
      {"reshard_after_forward": True, "mixed_precision_policy": "bfloat16"}},
     {"parallel.sharding": "hybrid_shard"}),
    ({"datasets": [{"path": "old", "type": "sharegpt", "conversation": "chatml"}]},
     {"data.sources.0.type": "chat", "data.chat_template": "chatml"}),
    ({"chat_template": "jinja", "chat_template_jinja": "mine.jinja", "datasets": [CHAT]},
     {"data.chat_template": "mine.jinja"}),
    ({"datasets": [{"path": "json", "data_files": ["a.jsonl", "b"], "type": "completion",
                    "field": "body"}]},
     {"data.sources.1.path": "b", "data.sources.1.format": "json", "data.sources.0.field": "body",
      "data.long_examples": "split"}),
    ({"datasets": [{"path": "a/b", "type": "alpaca", "split": "train[:9%]"}]},
     {"data.sources.0.split": "train[:9%]"}),
    ({"datasets": [{"path": "ids.parquet", "type": None, "split": "test"}],
      "excess_length_strategy": "raise"},
     {"data.sources.0.type": "tokenized", "data.sources.0.split": "test",
      "data.long_examples": "fail"}),
    ({"datasets": None, "pretraining_dataset": [{"path": "c4", "name": "en", "text_column": "t"}]},
     {"data.sources.0.type": "completion", "data.sources.0.subset": "en",
      "data.sources.0.field": "t", "data.packing": "best_fit"}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "wanted"), TRANSLATED, ids=lambda v: next(iter(v), "nothing"))
def test_keys_become_rostras(given: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, **given)
    assert {path: found_in(config, path) for path in wanted} == wanted


def test_every_optimizer_and_every_shipped_file_is_one_of_ours(tmp_path: Path) -> None:
    from rostra.config.axolotl_layout import SHIPPED
    from rostra.config.axolotl_training import OPTIMIZERS

    for name in OPTIMIZERS:
        config_of(tmp_path, optimizer=name)
    for name in SHIPPED:
        assert config_of(tmp_path, deepspeed=f"{name}.json").parallel != "auto"


def test_the_batch_is_for_the_ranks_that_share_no_sample(tmp_path: Path) -> None:
    for ranks, split, size in ((1, 1, 8), (4, 1, 32), (4, 2, 16)):
        config = config_of(
            tmp_path, ranks, micro_batch_size=4, gradient_accumulation_steps=2,
            context_parallel_size=split,
        )  # fmt: skip
        assert config.train.global_batch_size == size


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"rl": "dpo"}, "rl", "no training on preferences"),
    ({"processor_type": "AutoProcessor"}, "processor_type", "no images"),
    ({"sequence_lenn": 4}, "sequence_lenn", "Did you mean `sequence_len`"),
    ({"sequence_len": 4, "sequence_length": 5}, "sequence_length", "`sequence_len` is given too"),
    ({"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins", "Axolotl's own code"),
    ({"hub_model_id": "me/mine"}, "hub_model_id", "nothing is uploaded"),
    ({"trust_remote_code": True}, "trust_remote_code", "runs no code"),
    ({"optimizer": "came_pytorch"}, "optimizer", "no optimizer 'came_pytorch'"),
    ({"lr_scheduler": "rex"}, "lr_scheduler", "no schedule 'rex'"),
    ({"micro_batch_size": "many"}, "micro_batch_size", "should be a number"),
    ({"val_set_size": 100}, "val_set_size", "holds out a share"),
    ({"bf16": True, "fp16": True}, "fp16", "bf16 is on too"),
    ({"load_in_4bit": True}, "load_in_4bit", "add an adapter"),
    ({"adapter": "qlora", "load_in_4bit": False}, "load_in_4bit", "4-bit base"),
    ({"adapter": "lora", "lora_target_modules": ["q_proj", "model.*"]}, "lora_target_modules",
     "'model.*' is a pattern in a list"),
    ({"adapter": "lora", "lora_target_linear": True, "lora_target_modules": "model.*"},
     "lora_target_modules", "lora_target_linear is on too"),
    ({"adapter": "lora", "loraplus_lr_ratio": 16, "lora_target_modules": ["q_proj", "wte"]},
     "loraplus_lr_ratio", r"around wte Axolotl's LoRA+ learns at loraplus_lr_embedding"),
    ({"adapter": "qlora", "load_in_8bit": True}, "load_in_8bit", "write adapter: lora"),
    ({"deepspeed": {"zero_optimization": {"stage": 2}, "comment": "long " * 99}}, "deepspeed",
     "write this block to a JSON file"),
    ({"fsdp": ["hybrid_shard"], "fsdp_config": {"reshard_after_forward": False}},
     "fsdp_config.reshard_after_forward", "hybrid_shard gathers"),
    ({"fsdp_config": {"mixed_precision_policy": "bfloat16"}, "fp16": True},
     "fsdp_config.mixed_precision_policy", "precision.compute is fp16"),
    ({"deepspeed": "zero9.json"}, "deepspeed", "no file zero9.json"),
    ({"deepspeed": "zero1.json", "fsdp": ["full_shard"]}, "deepspeed", "keep one"),
    ({"fsdp_config": {"fsdp_ofload": True}}, "fsdp_config.fsdp_ofload", "offload_params"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "write the template to a file"),
    ({"chat_template": "jamba"}, "chat_template", "no template 'jamba'"),
    ({"datasets": [{**CHAT, "message_property_mappings": {"tool_calls": "calls"}}]},
     "datasets.0.message_property_mappings", "rename `calls`"),
    ({"datasets": [{**CHAT, "shards": 4}]}, "datasets.0.shards", "read whole"),
    ({"sequence_len": [4]}, "sequence_len", "one word or number"),
    ({"datasets": [{**CHAT, "train_on_eos": "none"}]}, "datasets.0.train_on_eos", "no ends 'none'"),
    ({"datasets": [{**CHAT, "train_on_eos": "last", "train_on_eot": "all"}]},
     "datasets.0.train_on_eot", "one mark ends a turn"),
    ({"datasets": [{**CHAT, "path": "hub/id", "data_files": "a.json"}]}, "datasets.0.data_files",
     "of the hub"),
    ({"datasets": [{"path": "x", "type": "alpaca_chat.load_qa"}]}, "datasets.0.type", "use alpaca"),
    ({"datasets": [{"path": "x.json", "type": "alpaca", "split": "train[:9]"}]},
     "datasets.0.split", "a slice of files"),
    ({"datasets": [{"path": "x", "type": {"formt": "y"}}]}, "datasets.0.type.formt", "`format`"),
    ({"datasets": None}, "datasets", "missing"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "key", "said"), REFUSED, ids=lambda v: v if v is str else None)
def test_what_rostra_has_nothing_for_is_refused_by_name(
    given: dict[str, Any], key: str, said: str, tmp_path: Path
) -> None:
    path = write(tmp_path, given)
    refused = {a.key: a for a in read_axolotl(path).refused}
    assert said in refused[key].reason
    line = refused[key].line
    with pytest.raises(RequestError) as caught:
        read_config(path)
    assert f"{path}{'' if line is None else f':{line}'}: {key}: " in str(caught.value)
    if line is not None:  # the line is the one where the key stands
        assert f"{key.rsplit('.', maxsplit=1)[-1]}:" in path.read_text().splitlines()[line - 1]


def test_a_slip_of_a_number_is_told_once(tmp_path: Path) -> None:
    found = read_axolotl(write(tmp_path, {"save_steps": "often"}))
    said = [a.key for kind in (found.translated, found.needless, found.refused) for a in kind]
    assert said.count("save_steps") == 1


OFF = ["rl", "hub_model_id", "processor_type", "early_stopping_patience"]


def test_what_is_switched_off_is_needless_and_kernels_are_too(tmp_path: Path) -> None:
    liger = "axolotl.integrations.liger.LigerPlugin"
    given = dict.fromkeys(OFF, False) | {"plugins": [liger], "liger_rope": True, "tf32": True}
    found: Translation = read_axolotl(write(tmp_path, given))
    said = {a.key: a.reason for a in found.needless}
    assert not found.refused
    assert {said[key] for key in OFF} == {"switched off"}
    assert liger in said["plugins"]
    assert "kernel" in said["liger_rope"]
    assert "float32" in said["tf32"]


def test_rostras_own_checks_name_axolotls_key_and_line(tmp_path: Path) -> None:
    text = "base_model: m\nlearning_rate: 1\ndatasets:\n  - {path: a, type: alpaca}\n"
    with pytest.raises(RequestError) as caught:
        read_config(write(tmp_path, f"{text}weight_decay: -1\nsequence_length: 0\n"))
    said = str(caught.value).replace(str(tmp_path), "")
    assert "/axolotl.yml:5 (weight_decay): optimizer.weight_decay = -1: should be" in said
    assert "/axolotl.yml:6 (sequence_length): data.sequence_length = 0: should be" in said


def test_a_file_is_read_with_overrides_and_tells_what_became_of_it(tmp_path: Path) -> None:
    path = write(tmp_path, {"sequence_length": 32, "wandb_project": "mine"})
    told: list[str] = []
    config = read_config(path, ["train.steps=3", "train.epochs=null"], 2, told.append)
    assert (config.train.steps, config.train.global_batch_size) == (3, 2)
    (said,) = told
    for words in ("for 2 ranks", "wandb_project", "meant: `sequence_len`"):
        assert words in said


def test_migrate_writes_what_train_reads(tmp_path: Path) -> None:
    path, new = write(tmp_path, {"sequence_length": 32, "tf32": True}), tmp_path / "rostra.yaml"
    done = rostra("migrate", path, "--workers", "2", "--json", "--output", new)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said) == {"config", "translated", "needless", "refused"}
    assert said["needless"][0]["key"] == "tf32"
    assert read_config(new) == read_config(path, ranks=2)
    again = rostra("migrate", path, "--output", new)
    assert (again.returncode, "cannot be written" in again.stderr) == (2, True)
    shown = rostra("migrate", path, cwd=tmp_path)
    assert "sequence_length: 32" in shown.stdout
    assert "needless" in shown.stderr
    write(tmp_path, {"rl": "dpo"})
    refused = rostra("migrate", path, "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["refused"][0]["key"] == "rl"
    assert "rl: no training on preferences" in refused.stderr
    other = rostra("migrate", new)
    assert (other.returncode, "is no Axolotl file" in other.stderr) == (2, True)
