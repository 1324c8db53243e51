"""Axolotl's files (https://docs.axolotl.ai/docs/config-reference.html) as Rostra's config.

Every key is translated, found needless with a reason, or refused with one; nothing is dropped
in silence. What holds in Axolotl where a file says nothing is written out.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML

from rostra.config.axolotl_answers import Answer, Key, Part, Translation, answer
from rostra.config.axolotl_keys import ALIASES, DEFAULTS, KEYS, SLIPS
from rostra.config.schema import Config

NEEDED = ("base_model", "datasets", "learning_rate")


def is_axolotl(values: Any) -> bool:
    """Whether a YAML's content is an Axolotl file: it names its model at the top."""
    return isinstance(values, dict) and "base_model" in values


def translate(
    values: Mapping[str, Any], lines: Mapping[Key, int], name: str, ranks: int = 1
) -> Translation:
    """An Axolotl file's content as a config, with an answer to every key.

    `lines` are the lines of its keys, `name` the file's. Axolotl's batch is micro_batch_size x
    gradient_accumulation_steps x ranks, Rostra's is of the whole step: `ranks` says for how many.
    """
    found = Translation(name, lines, ranks)
    given = {str(key): value for key, value in values.items()}
    names = SLIPS | ALIASES
    written = {names.get(key, key) for key, value in given.items() if value is not None}
    missing = {key: value for key, value in DEFAULTS.items() if key not in written}
    answer(Part(found, _joined(given, missing)), KEYS, "Axolotl", SLIPS, ALIASES)
    for key in NEEDED:
        if not (given.get(key) or (key == "datasets" and given.get("pretraining_dataset"))):
            found.refused.append(Answer(key, None, "missing; it must be given"))
    found.config = {
        name: found.config[name] for name in Config.model_fields if name in found.config
    }
    for answers in (found.translated, found.needless, found.refused):
        answers.sort(key=lambda one: (one.line is None, one.line or 0))
    return found


def _joined(given: dict[str, Any], missing: dict[str, Any]) -> dict[str, Any]:
    """The file's values and Axolotl's own; an empty key that has a default counts as unsaid."""
    return {k: v for k, v in given.items() if k not in missing} | missing


def to_yaml(translation: Translation) -> str:
    """The config as a file of Rostra."""
    out = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(translation.config, out)
    return f"# {translation.name}, by `rostra migrate`\n{out.getvalue()}"


def show(translation: Translation, with_config: bool = True) -> None:
    """Print what became of each key to standard error, and the config to standard output, unless
    a key was refused."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    for kind in ("translated", "needless", "refused"):
        for one in getattr(translation, kind):
            line = "" if one.line is None else str(one.line)
            table.add_row(line, one.key, kind, one.reason)
    Console(stderr=True, markup=False, highlight=False).print(table)
    if with_config and not translation.refused:
        print(to_yaml(translation), end="")
