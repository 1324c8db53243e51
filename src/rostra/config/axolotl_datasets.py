"""The keys of one dataset of an Axolotl file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rostra.config.axolotl_answers import Needless, Part, Refused, Rule, answer, every

# Axolotl's prompt strategies that Rostra has, by name.
TYPES = {
    "alpaca": "alpaca",
    "chat_template": "chat",
    "chat_template.default": "chat",
    "sharegpt": "chat",
    "sharegpt.load": "chat",
    "completion": "completion",
    "pretrain": "completion",
    "input_output": "input_output",
}
FORMATS = {"json": "json", "csv": "csv", "parquet": "parquet", "arrow": "dataset"}
ENDINGS = {".json", ".jsonl", ".csv", ".parquet"}
TEMPLATES = (  # those of data.chat_template
    "alpaca aya chatml cohere deepseek_v2 deepseek_v3 exaone gemma gemma3 llama3 llama4 "
    "mistral_v1 mistral_v2v3 mistral_v3_tekken mistral_v7_tekken phi_3 phi_35 phi_4 qwen3 "
    "qwen_25 vicuna zephyr"
).split()
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "input": "user"}


def source(part: Part, whole: bool) -> None:
    """One dataset, or `whole`: one of pretraining."""
    part.kind = "completion" if whole else _kind(part.values.get("type"))
    answer(part, DATASET_RULES, "a dataset")
    if not part.on("path"):
        part.refuse("path", "missing; it must be given")


def _kind(kind: Any) -> str:
    if isinstance(kind, dict):
        return "mapping"
    if kind in (None, ""):
        return "tokenized"
    return TYPES.get(str(kind), "")


def type_of(part: Part, key: str, value: Any) -> None:
    if isinstance(value, dict):
        part.set(key, "type", "mapping")
        inner = Part(part.into, dict(value), (*part.key, key), part.base, "mapping")
        answer(inner, MAPPING_RULES, "a dataset's type")
    elif part.kind:
        part.set(key, "type", part.kind)
    else:
        near = difflib.get_close_matches(str(value).split(".")[0], TYPES, n=1, cutoff=0.4)
        also = f"use {near[0]}, or " if near else ""
        part.refuse(key, f"no prompt strategy {value!r} here: {also}say your own with a table of "
                    "field_instruction, field_input, field_output and format")  # fmt: skip


def path_of(part: Part, key: str, value: Any) -> None:
    part.set(key, "path", value)
    if part.values.get("type") in (None, ""):
        note = "no type: records of tokens" if part.kind == "tokenized" else ""
        part.set(key, "type", part.kind, note)


def format_of(part: Part, key: str, value: Any) -> None:
    if Path(str(part.values.get("path"))).suffix in ENDINGS:
        part.needless(key, "the file's ending tells")
    elif value in FORMATS:
        part.set(key, "format", FORMATS[value])
    else:
        part.refuse(key, f"no files of {value!r} here; known: {', '.join(FORMATS)}")


def files_of(part: Part, key: str, value: Any) -> None:
    names = {str(name) for name in (value if isinstance(value, list) else [value])}
    if any(str(part.values.get("path")).endswith(name) for name in names):
        part.merge(key, "goes into path")
    else:
        part.refuse(key, "files of a dataset of the hub: download them, and name one in `path`")


def split_of(part: Part, key: str, value: Any) -> None:
    path = Path(str(part.values.get("path")))
    if "[" in str(value) and (path.exists() or path.suffix in ENDINGS):
        part.refuse(key, "a slice of files; give a file with what you want of them")
    else:
        part.set(key, "split", value)


def thinking(part: Part, key: str, value: Any) -> None:
    """A message's further keys reach the template as they are, under their own names."""
    own = "reasoning_content"
    pair = [part.values.get(k) or own for k in ("field_thinking", "template_thinking_key")]
    if pair[0] == pair[1]:
        part.needless(key, "further keys of a message reach the template as they are")
    else:
        part.refuse(key, f"rename `{pair[0]}` to `{pair[1]}` in the records")


def named(name: str) -> Rule:
    return lambda part, key, value: part.set(key, name, value)


def same_as(usual: str, what: str) -> Callable[[Part, str, Any], None]:
    """The rule of a key that may only name what is named so anyway."""

    def rule(part: Part, key: str, value: Any) -> None:
        if value in (usual, False):
            part.needless(key, f"{what} `{usual}` anyway")
        else:
            part.refuse(key, f"{what} `{usual}` here; rename it in the records")

    return rule


def properties(part: Part, key: str, value: Any) -> None:
    if not isinstance(value, dict):
        part.refuse(key, "should be a table, such as `{role: from, content: value}`")
        return
    for name, column in value.items():
        if name in ("role", "content"):
            part.set(key, name, column)
        elif name == column:
            part.merge(key, f"`{name}` is read under its own name anyway")
        else:
            part.refuse(key, f"`{name}` is read under its own name; rename `{column}` to it")


def roles(part: Part, key: str, value: Any) -> None:
    """Axolotl lists the names of each role; Rostra has the role of each name."""
    known = ("system", "user", "assistant", "tool")
    if not isinstance(value, dict):
        part.refuse(key, "should be a table, such as `user: [human]`")
        return
    if odd := [role for role in value if role not in known]:
        part.refuse(key, f"no role `{odd[0]}` here; known: {', '.join(known)}")
        return
    part.set(key, "roles", _roles_of(value))


def _roles_of(value: dict[str, Any]) -> dict[str, str]:
    listed = {role: n if isinstance(n, list) else [n] for role, n in value.items()}
    return {str(name): role for role, names in listed.items() for name in names}


def roles_to_train(part: Part, key: str, value: Any) -> None:
    given = part.values.get("roles")
    own = ROLES | (_roles_of(given) if isinstance(given, dict) else {})
    listed = [str(name) for name in (value if isinstance(value, list) else [value])]
    part.set(key, "train_roles", list(dict.fromkeys(own.get(name, name) for name in listed)))


def train_on_end(part: Part, key: str, value: Any) -> None:
    """One mark ends a turn here: what Axolotl calls eos or eot."""
    other = part.values.get("train_on_eos" if key == "train_on_eot" else "train_on_eot")
    if value not in ("turn", "all", "last"):
        part.refuse(key, f"no ends {value!r} here; known: turn, all, last")
    elif other not in (None, value):
        part.refuse(key, "train_on_eos and train_on_eot differ, and one mark ends a turn here")
    else:
        part.set(key, "train_ends", value)


def template(part: Part, key: str, value: Any) -> None:
    """One template stands for all data: of the whole file, or the same in each dataset."""
    jinja = part.values.get("chat_template_jinja")
    name = jinja if value == "jinja" else value
    if key == "chat_template_jinja":
        if part.values.get("chat_template") not in (None, "jinja"):
            part.needless(key, "chat_template names another one")
            return
        name = value
    if value == "jinja" and jinja:
        part.merge(key, "chat_template_jinja says it")
    elif name == "tokenizer_default":
        part.needless(key, "the tokenizer's own is the default")
    elif str(name).startswith("tokenizer_default_fallback_"):
        other = str(name).removeprefix("tokenizer_default_fallback_")
        part.needless(key, "the tokenizer's own is the default; if it has none, set "
                      f"data.chat_template: {other}")  # fmt: skip
    elif re.search(r"{[{%]", str(name)):
        part.refuse(key, "write the template to a file, and name that")
    elif name not in TEMPLATES and not re.search(r"[./]", str(name)):
        part.refuse(key, f"no template {name!r} here; remove it for the tokenizer's own, name a "
                    f"Jinja file, or one of {', '.join(TEMPLATES)}")  # fmt: skip
    elif part.into.config.get("data", {}).get("chat_template", name) != name:
        part.refuse(key, "another template is set already, and one stands for all data")
    else:
        part.put(key, "data.chat_template", name, DEFAULT_SYSTEM.get(name, ""))


# Templates that in Axolotl begin with a system text of their own, and here with none.
DEFAULT_SYSTEM = dict.fromkeys(
    ("mistral_v7_tekken", "phi_4"),
    "without the system text that Axolotl makes up where a conversation has none",
)


def _only(kind: str, rule: Rule) -> Rule:
    """`rule`, where the dataset is of that kind; elsewhere the key says nothing."""

    def checked(part: Part, key: str, value: Any) -> None:
        if part.kind != kind:
            part.needless(key, f"says nothing to type {part.values.get('type')}")
        elif callable(rule):
            rule(part, key, value)

    return checked


_CHAT: dict[str, Rule] = {
    "field_messages": named("messages"),
    "message_property_mappings": properties,
    "message_field_role": named("role"),
    "message_field_content": named("content"),
    "roles": roles,
    "roles_to_train": roles_to_train,
    "train_on_eos": train_on_end,
    "train_on_eot": train_on_end,
    "chat_template": template,
    "chat_template_jinja": template,
    "conversation": template,
    "field_tools": same_as("tools", "tools are read from"),
    "message_field_training": named("message_weight"),
    "field_thinking": thinking,
    "template_thinking_key": thinking,
}
DATASET_RULES: dict[str, Rule] = {
    "type": type_of,
    "path": path_of,
    "data_files": files_of,
    "ds_type": format_of,
    "split": split_of,
    "name": named("subset"),
    **{key: _only("chat", rule) for key, rule in _CHAT.items()},
    **dict.fromkeys(("field", "text_column"), _only("completion", named("field"))),
    **every(
        (("records are prepared in a stream", "preprocess_shards"),),
        Needless,
    ),
    **every(
        (
            (
                "a dataset is read whole; write its share to a file, and name that",
                "shards shards_idx skip",
            ),
            ("Rostra runs no code of a dataset", "trust_remote_code"),
            (
                "the newest version is read; download the one you mean, and name its folder",
                "revision",
            ),
            (
                "records are read as they are; bring them into their form before",
                "input_transform input_format field_human field_model drop_system_message",
            ),
            (
                "messages reach the template as they are; split them in the records",
                "split_thinking",
            ),
            (
                "whole turns are trained, not parts of them",
                "message_field_training_detail",
            ),
            (
                "no training on preferences or rewards",
                "field_chosen field_rejected step_separator max_completion_length "
                "train_on_last_step_only",
            ),
            ("no distillation", "logprobs_field temperature"),
            ("no made-up data", "length sequence_length min_input_id max_input_id seed"),
        ),
        Refused,
    ),
}

MAPPING_RULES: dict[str, Rule] = {
    **{
        name: named(name)
        for name in ("field_system", "field_instruction", "field_input", "field_output")
    },
    "system_prompt": named("system_prompt"),
    "system_format": named("system_format"),
    "format": named("prompt"),
    "no_input_format": named("prompt_without_input"),
    **every(
        (
            (
                "no training on preferences",
                "field_prompt field_chosen field_rejected field_completion field_label "
                "prompt_format chosen_format rejected_format completion_format",
            ),
        ),
        Refused,
    ),
}
