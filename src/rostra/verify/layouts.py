"""Layouts by name, as `key=value` and in files, for a config that has another one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rostra.config import Config
from rostra.config.schema import MemorySection, ParallelTable
from rostra.errors import RequestError
from rostra.layout import AXES

# The common layouts on up to four ranks, with the keys of the config's `parallel`.
NAMED: dict[str, dict[str, Any]] = {
    "ddp": {"replicate": 2},
    "ddp_uneven": {"replicate": 3},
    "zero1": {"shard": 2, "sharding": "zero1"},
    "shard_grad_op": {"shard": 2, "sharding": "shard_grad_op"},
    "full_shard": {"shard": 2, "sharding": "full_shard"},
    "hybrid_shard": {"replicate": 2, "shard": 2, "sharding": "hybrid_shard"},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "ring": {"context": 2, "context_method": "ring"},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "1f1b": {"pipeline": 2, "schedule": "1f1b"},
    "interleaved_1f1b": {"pipeline": 2, "schedule": "interleaved_1f1b", "stages": 2},
    "zero_bubble": {"pipeline": 2, "schedule": "zero_bubble", "stages": 2},
    "ddp_tensor": {"replicate": 2, "tensor": 2},
    "ddp_context": {"replicate": 2, "context": 2},
    "ddp_pipeline": {"replicate": 2, "pipeline": 2},
    "zero1_pipeline": {"shard": 2, "sharding": "zero1", "pipeline": 2},
    "full_shard_tensor": {"shard": 2, "sharding": "full_shard", "tensor": 2},
    "full_shard_context": {"shard": 2, "sharding": "full_shard", "context": 2},
    "full_shard_pipeline": {"shard": 2, "sharding": "full_shard", "pipeline": 2},
    "tensor_context": {"tensor": 2, "context": 2},
    "tensor_pipeline": {"tensor": 2, "pipeline": 2},
    "context_pipeline": {"context": 2, "pipeline": 2},
    "deepspeed_zero1": {"engine": "deepspeed", "shard": 2, "sharding": "zero1"},
    "deepspeed_zero2": {"engine": "deepspeed", "shard": 2, "sharding": "shard_grad_op"},
    "deepspeed_zero3": {"engine": "deepspeed", "shard": 2, "sharding": "full_shard"},
}
OWN = "own"  # the config's

# Keys of a layout that stand elsewhere in the config.
_MEMORY = ("activation_checkpointing", "optimizer_states", "optimizer_in_backward")
_OFFLOAD = {"offload_parameters": "parameters", "offload_optimizer": "optimizer"}
_PARALLEL = set(ParallelTable.model_fields) | {"pipeline_schedule"}
KEYS = sorted({*_PARALLEL, *_MEMORY, *_OFFLOAD})


@dataclass(frozen=True)
class Asked:
    """A layout that was asked for: the config that has it, and its ranks."""

    name: str
    keys: dict[str, Any]
    config: Config
    ranks: int


def parse(values: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The layouts that command-line values ask for, by name: each value is a file (YAML or
    JSON), one layout as `shard=2,tensor=2`, or names of `NAMED` (and `own`) with commas between.

    Raises RequestError for what is none of these.
    """
    found: dict[str, dict[str, Any]] = {}
    for value in values:
        if value.endswith((".yaml", ".yml", ".json")):
            found |= _in_file(Path(value))
        elif "=" in value:
            found |= _free(value)
        else:
            for name in filter(None, (part.strip() for part in value.split(","))):
                found[name] = _named(name)
    return found


def _in_file(path: Path) -> dict[str, dict[str, Any]]:
    """From a table of layouts by name, or a list of tables and of what `parse` takes."""
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise RequestError(f"--layouts {path}: cannot read layouts from it: {error}") from error
    if isinstance(content, dict) and all(isinstance(v, dict) for v in content.values()):
        return {str(name): keys for name, keys in content.items()}
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"--layouts {path}: is a list of layouts, or a table of them by name; each is a table "
            "such as {shard: 2, sharding: full_shard}, or a name such as ddp"
        )
    found: dict[str, dict[str, Any]] = {}
    for each in content:
        if isinstance(each, dict):
            found[",".join(f"{key}={value}" for key, value in each.items())] = each
        else:
            found |= parse([str(each)])
    return found


def _free(text: str) -> dict[str, dict[str, Any]]:
    keys = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise RequestError(
                f"--layouts {text}: {part!r} has no value; write one layout as key=value,"
                "key=value, and names as another --layouts"
            )
        keys[key] = YAML(typ="safe", pure=True).load(value)
    return {text: keys}


def _named(name: str) -> dict[str, Any]:
    if name == OWN:
        return {}
    if name not in NAMED:
        raise RequestError(
            f"--layouts {name}: no layout has this name; {_nearest(name, [OWN, *NAMED])}; or write "
            "it as key=value: shard=2,tensor=2"
        )
    return NAMED[name]


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"


def with_layout(config: Config, name: str, keys: Mapping[str, Any]) -> Asked:
    """`config` with the layout that `keys` say; what they leave out of `memory` stays.

    Raises RequestError for a key or value that a layout cannot have.
    """
    if unknown := next((key for key in keys if key not in KEYS), None):
        raise RequestError(f"--layouts {name}: no key {unknown!r}; {_nearest(unknown, KEYS)}")
    parallel = {"schedule" if k == "pipeline_schedule" else k: keys[k] for k in _PARALLEL & {*keys}}
    memory = config.memory.model_dump() | {key: keys[key] for key in _MEMORY if key in keys}
    memory["offload"] |= {_OFFLOAD[key]: keys[key] for key in _OFFLOAD if key in keys}
    try:
        table = ParallelTable.model_validate(parallel)
        changed = {"parallel": table, "memory": MemorySection.model_validate(memory)}
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"--layouts {name}: {where}: {first['msg']}") from error
    return Asked(name, dict(keys), config.model_copy(update=changed), ranks_of(table))


def own_layout(config: Config, most: int) -> Asked:
    """The config's layout on at most `most` ranks, if it can be had: of axes that are longer,
    2 are taken when it needs more. Data ranks whose number is left open are two."""
    table = config.parallel
    if table == "auto":
        return Asked(OWN, {}, config, 1)
    name = OWN
    if ranks_of(table) > most:
        smaller = {axis: min(2, size) for axis in AXES if (size := getattr(table, axis))}
        table, name = table.model_copy(update=smaller), f"{OWN}, with axes of 2"
    ranks = ranks_of(table)
    if table.replicate is None and table.shard is None and 2 * ranks <= most:
        ranks *= 2
    keys = table.model_dump(exclude_defaults=True)
    return Asked(name, keys, config.model_copy(update={"parallel": table}), ranks)


def ranks_of(table: ParallelTable) -> int:
    """What its axes make up."""
    return prod(getattr(table, axis) or 1 for axis in AXES)
