"""Shapes of well-known models without the network: a table as data, or any config.json."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from ruamel.yaml import YAML
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rostra.errors import RequestError

# What variants of one shape have in their names, at the beginning or at the end.
_VARIANTS = re.compile(r"^meta-|-(hf|instruct|chat|base|it|pt|bnb|4bit|unsloth)(?=-|$)")


def find_shape(name: str, length: int | None = None) -> PretrainedConfig:
    """The config of a model that `name` says: a folder with a config.json or such a file, a
    model of the table (shapes.yaml) by its id on the hub, or one in the hub's cache here.

    Where the table leaves the number of positions open, there are as many as `length`. Nothing
    is downloaded, and no code of a model is run.
    Raises RequestError when there is no such model, with the nearest names.
    """
    shape = _from_disk(Path(name)) or _from_table(name, length) or _from_cache(name)
    if shape is None:
        near = nearest_shapes(name)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise RequestError(
            f"model = {name!r}: unknown shape; {hint}"
            "give a folder or config.json of the model (rostra.models.shape_names() lists what is "
            "known without)"
        )
    return shape


def shape_names() -> list[str]:
    """All models of the table, by their ids on the hub."""
    return [shape.name for shape in _table()]


def nearest_shapes(name: str) -> list[str]:
    """The names of the table that are most like `name`, the nearest first."""
    known = _by_key()
    close = difflib.get_close_matches(_key(name), known, n=8, cutoff=0.5)
    return list(dict.fromkeys(known[key].name for key in close))[:4]


@dataclass(frozen=True)
class _Shape:
    name: str  # on the hub
    family: str  # transformers' model type
    values: dict[str, Any]


@functools.cache
def _table() -> tuple[_Shape, ...]:
    text = (files("rostra.models") / "shapes.yaml").read_text(encoding="utf-8")
    found = []
    for family, models in YAML(typ="safe", pure=True).load(text).items():
        for name, values in models.items():
            others = values.pop("also", {})
            found.append(_Shape(name, family, values))
            for other in others:
                changes = others[other] if isinstance(others, dict) else {}
                found.append(_Shape(other, family, values | changes))
    return tuple(found)


@functools.cache
def _by_key() -> dict[str, _Shape]:
    """Shapes by the keys of their names; the first keeps a key that two have."""
    found: dict[str, _Shape] = {}
    for shape in _table():
        for name in (shape.name, shape.name.rpartition("/")[2]):
            found.setdefault(_key(name), shape)
    return found


def _key(name: str) -> str:
    """A name without case, variants and punctuation; with its owner if it has one."""
    owner, slash, model = name.lower().rpartition("/")
    plain = _VARIANTS.sub("", re.sub(r"[\s_]", "-", model))
    return owner + slash + re.sub(r"[^a-z0-9.]|\.(?!\d)", "", plain)  # 1.3b is not 13b


def _from_table(name: str, length: int | None) -> PretrainedConfig | None:
    known = _by_key()
    shape = known.get(_key(name)) or known.get(_key(name.rpartition("/")[2]))
    if shape is None:
        return None
    values = dict(shape.values)
    if shape.family == "gpt2" and length is not None:
        values.setdefault("n_positions", length)
    return AutoConfig.for_model(shape.family, **values)


def _from_disk(path: Path) -> PretrainedConfig | None:
    if path == Path() or not path.exists():
        return None
    file = path / "config.json" if path.is_dir() else path
    try:
        shape = AutoConfig.from_pretrained(file, trust_remote_code=False)
    except StrictDataclassError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise RequestError(f"{file}: no model can be so: {reason}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        first = str(error).strip().splitlines()[0]
        raise RequestError(
            f"{path}: no model's config: {first} (give a folder that holds config.json, or it)"
        ) from error
    if shape.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise RequestError(f"{path}: a {shape.model_type} does not write text from left to right")
    return shape


def _from_cache(name: str) -> PretrainedConfig | None:
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
