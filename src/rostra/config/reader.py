"""From a YAML file and `--set` overrides to a frozen `Config`, or one message that says,
for each thing that is wrong, the file, the line, the key, the value and what to do."""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML, MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from rostra.config.axolotl import is_axolotl, translate
from rostra.config.axolotl_answers import Key, Translation
from rostra.config.schema import Config
from rostra.errors import RequestError


def read_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    ranks: int = 1,
    notice: Callable[[str], None] | None = None,
) -> Config:
    """Read `path` (YAML 1.2), apply `section.key=value` overrides, check, and fill defaults.

    The file may be one of Axolotl, whose batch grows with the ranks: it is for so many `ranks`,
    and `notice` is told what became of its keys.
    Raises RequestError when the file cannot be read or does not describe a run.
    """
    values, lines = _read(path)
    places = {key: f"{path}:{line}" for key, line in lines.items()}
    if is_axolotl(values):
        translation = translate(values, lines, str(path), ranks)
        translation.check()
        values, places = translation.config, translation.places
        if notice is not None:
            notice(translation.summary())
    for override in overrides:
        _override(values, override, places)
    return _check(values, places, str(path))


def read_axolotl(path: str | Path, ranks: int = 1) -> Translation:
    """An Axolotl file in Rostra's terms, for so many ranks; refused keys are in the answer.

    Raises RequestError when it is none, and for values that Rostra refuses.
    """
    values, lines = _read(path)
    if not is_axolotl(values):
        raise RequestError(f"{path}:1: is no Axolotl file: it has no `base_model` at the top")
    translation = translate(values, lines, str(path), ranks)
    if not translation.refused:
        _check(translation.config, translation.places, str(path))
    return translation


def _read(path: str | Path) -> tuple[dict[str, Any], dict[Key, int]]:
    """A YAML file's content, and the line of every key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot read the config file: {error}") from error
    tree, values = _parse(text, str(path))
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RequestError(f"{path}:1: a config is a table of sections; see `rostra schema`")
    return values, dict(_lines(tree))


def config_from_dict(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The same for a config given as a table, from Python."""
    copied: dict[str, Any] = json.loads(json.dumps(values))
    places: dict[Key, str] = {}
    for override in overrides:
        _override(copied, override, places)
    return _check(copied, places, "config")


def config_to_yaml(config: Config) -> str:
    """The config with every default written out."""
    out = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(config.model_dump(mode="json"), out)
    return out.getvalue()


def _parse(text: str, name: str) -> tuple[Node | None, Any]:
    yaml = YAML(typ="safe", pure=True)
    try:
        return yaml.compose(text), yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise RequestError(f"{name}{line}: not valid YAML: {error.problem}") from error
    except (YAMLError, ValueError) as error:
        raise RequestError(f"{name}: not valid YAML: {error}") from error


def _lines(node: Node | None, key: Key = ()) -> list[tuple[Key, int]]:
    """The line of every key in the file, counted from 1."""
    if node is None:
        return [(key, 1)]
    found = [(key, node.start_mark.line + 1)]
    if isinstance(node, MappingNode):
        for name, value in node.value:
            child = (*key, name.value if isinstance(name, ScalarNode) else str(name))
            found += _lines(value, child)
            found.append((child, name.start_mark.line + 1))
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            found += _lines(value, (*key, index))
    return found


def _override(values: dict[str, Any], text: str, places: dict[Key, str]) -> None:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise RequestError(f"--set {text}: write --set section.key=value")
    key: Key = tuple(int(p) if p.isdigit() else p for p in name.split("."))
    target: Any = values
    for part, after in pairwise(key):
        if isinstance(target, list) and isinstance(part, int) and part <= len(target):
            if part == len(target):
                target.append({})
            target = target[part]
        elif isinstance(target, dict):
            if not isinstance(target.get(part), dict | list):
                target[part] = [] if after == 0 else {}
            target = target[part]
        else:
            raise RequestError(f"--set {text}: there is no {part!r} in what {name!r} leads through")
    last, parsed = key[-1], _parse(value, f"--set {text}")[1]
    if isinstance(target, dict) or (isinstance(last, int) and last < len(target)):
        target[last] = parsed
    elif last == len(target):
        target.append(parsed)
    else:
        raise RequestError(f"--set {text}: {name!r} is a list of {len(target)}, counted from 0")
    places[key] = f"--set {text}"


def _check(values: dict[str, Any], places: dict[Key, str], name: str) -> Config:
    try:
        content = json.dumps(values)
    except TypeError as error:
        raise RequestError(f"{name}: a value is no number, text, list or table: {error}") from error
    try:
        return Config.model_validate_json(content, strict=True)
    except ValidationError as error:
        messages: dict[Key, list[str]] = {}
        for item in error.errors(include_url=False, include_context=False):
            key = _plain_key(item["loc"], values)
            messages.setdefault(key, []).append(_explain(item["type"], item["msg"], key))
        for key in [k for k in messages if k and any(k == m[:-1] for m in messages)]:
            del messages[key]  # this table is wrong only because something in it is
        shown = [_show(key, said, values, places, name) for key, said in messages.items()]
        raise RequestError("\n".join(shown)) from None


def _plain_key(loc: tuple[str | int, ...], values: Any) -> Key:
    """Pydantic's location without the names of union members it passes through."""
    key: list[str | int] = []
    for index, part in enumerate(loc):
        if isinstance(values, list) and isinstance(part, int):
            values = values[part] if part < len(values) else None
        elif isinstance(values, dict) and (part in values or _is_field(key, part)):
            values = values.get(part)
        elif index == len(loc) - 1 and isinstance(values, dict) and part not in _tags():
            pass
        else:
            continue
        key.append(part)
    return tuple(key)


def _tags() -> set[str]:
    """Names that pydantic puts into locations: the types of sources, and union members."""
    return {
        tag for model in _source_models() for tag in get_args(model.model_fields["type"].annotation)
    }


def _source_models() -> list[type[BaseModel]]:
    item = get_args(Config.model_fields["data"].annotation.model_fields["sources"].annotation)[0]  # type: ignore[union-attr]
    return list(get_args(get_args(item)[0]))


def _section(key: Sequence[str | int]) -> list[type[BaseModel]]:
    """The sections that may stand at `key`; several where a list holds several types."""
    models: list[type[BaseModel]] = [Config]
    for part in key:
        found: list[type[BaseModel]] = []
        for model in models:
            if isinstance(part, str) and part in model.model_fields:
                found += _models_in(model.model_fields[part].annotation)
        models = models if isinstance(part, int) else found
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _is_field(key: Sequence[str | int], part: str | int) -> bool:
    return any(part in model.model_fields for model in _section(key))


def _explain(kind: str, message: str, key: Key) -> str:
    if kind == "extra_forbidden":
        return "unknown key" + _suggest(key)
    types = ", ".join(sorted(_tags()))
    own = {
        "missing": "missing; it must be given",
        "union_tag_not_found": f"needs a `type`: one of {types}",
        "union_tag_invalid": f"unknown type; known: {types}",
        "tuple_type": "should be a list: begin each entry with `-`",
    }
    if kind == "string_pattern_mismatch" and "%" in message:
        return 'should be a percentage such as "3%"'
    if kind in own:
        return own[kind]
    return message.removeprefix("Value error, ").replace("Input should be", "should be")


def _suggest(key: Key) -> str:
    """The nearest known key of the section, or the section where the key belongs."""
    name = str(key[-1])
    known = {field for model in _section(key[:-1]) for field in model.model_fields}
    for section, field in Config.model_fields.items():
        if any(name in model.model_fields for model in _models_in(field.annotation)):
            return f"; did you mean `{section}.{name}`?"
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"; did you mean `{near[0]}`?"
    for section, field in Config.model_fields.items():
        for model in _models_in(field.annotation):
            if near := difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.8):
                return f"; did you mean `{section}.{near[0]}`?"
    if not known:
        return f"; section `{key[0]}` has no keys in this version: remove it"
    return f"; known here: {', '.join(sorted(known))}"


def _show(key: Key, said: list[str], values: Any, places: dict[Key, str], name: str) -> str:
    place = next((places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in places), name)
    for part in key:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            values = None
            break
    shown = "" if values is None or isinstance(values, dict | list) else f" = {json.dumps(values)}"
    dotted = ".".join(map(str, key))
    return f"{place}: {dotted}{shown}{': ' if dotted else ''}{' or '.join(dict.fromkeys(said))}"
