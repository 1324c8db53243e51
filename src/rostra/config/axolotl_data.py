"""Axolotl's keys of data: the list of datasets, and how samples are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rostra.config.axolotl_answers import Part, Rule, to
from rostra.config.axolotl_datasets import FORMATS, source, template


def datasets(part: Part, key: str, value: Any) -> None:
    entries = value if isinstance(value, list) else [value]
    count = len(part.into.config.get("data", {}).get("sources", []))
    for index, given in enumerate(entries):
        entry = {"path": given} if isinstance(given, str) else given  # the name may stand alone
        if not isinstance(entry, dict):
            part.refuse(key, "should be a list of tables, each with `path` and `type`")
            continue
        for values in _files(entry):
            inner = Part(part.into, values, (*part.key, key, index), f"data.sources.{count}")
            source(inner, whole=key == "pretraining_dataset")
            count += 1


def _files(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The entry once for each of its `data_files`, with that as its path, where it is a file."""
    files = entry.get("data_files")
    if not files:
        return [dict(entry)]
    path = str(entry.get("path", ""))
    names = files if isinstance(files, list) else [files]
    if path not in (*FORMATS, "text", "") and not Path(path).is_dir():
        return [dict(entry)]  # of a dataset of the hub: refused with the key
    folder = path if Path(path).is_dir() else ""
    own = {"ds_type": path} if path in (*FORMATS, "text") else {}
    return [{**own, **entry, "path": str(Path(folder, str(name)))} for name in names]


def packing(part: Part, key: str, value: Any) -> None:
    if part.on("pretraining_dataset"):
        part.put(key, "data.packing", "best_fit", "texts of pretraining are always packed")
    else:
        part.put(key, "data.packing", "best_fit" if value else "none")


def by_length(part: Part, key: str, value: Any) -> None:
    if value and part.on("sample_packing"):
        part.refuse(key, "packed samples are of one length; keep one of the two")
    elif value:
        part.put(key, "data.group_by_length", True)
    else:
        part.needless(key, "switched off")


def excess_length(part: Part, key: str, value: Any) -> None:
    """Completions are split by Axolotl, whatever the strategy for the other types."""
    listed = part.into.config.get("data", {}).get("sources", [])
    names = {"drop": "drop", "truncate": "truncate", "raise": "fail"}
    if value not in names:
        part.refuse(key, f"no strategy {value!r} here; known: {', '.join(names)}")
    elif listed and all(source.get("type") == "completion" for source in listed):
        part.put(key, "data.long_examples", "split", "completions are split")
    else:
        part.put(key, "data.long_examples", names[value])


def evaluation_length(part: Part, key: str, value: Any) -> None:
    if value == part.values.get("sequence_len"):
        part.needless(key, "sequence_len says it")
    else:
        part.refuse(key, "evaluation is at sequence_len; remove it")


def on_by_default(reason: str) -> Rule:
    """The rule of a switch that is on here, and cannot be switched off."""

    def rule(part: Part, key: str, value: Any) -> None:
        if value is False:
            part.refuse(key, f"{reason}; remove it")
        else:
            part.needless(key, reason)

    return rule


RULES: dict[str, Rule] = {
    "chat_template": template,
    "chat_template_jinja": template,
    "datasets": datasets,
    "pretraining_dataset": datasets,
    "sequence_len": to("data.sequence_length"),
    "eval_sequence_len": evaluation_length,
    "excess_length_strategy": excess_length,
    "sample_packing": packing,
    "group_by_length": by_length,
    "train_on_inputs": to("data.train_on_inputs"),
    "dataset_prepared_path": to("data.cache"),
    "shuffle_merged_datasets": on_by_default("samples are shuffled, by run.seed"),
    "pretrain_multipack_attn": on_by_default("attention never crosses examples"),
}
