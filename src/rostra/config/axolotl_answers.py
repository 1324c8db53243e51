"""What became of each key of an Axolotl file, and the table walk that makes sure each has an
answer: translated, needless, or refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rostra.errors import RequestError

Key = tuple[str | int, ...]
DROP = "Axolotl passes over this name in silence"


@dataclass(frozen=True)
class Answer:
    """A key of the file (dotted), its line (None: Axolotl's default), and what became of it."""

    key: str
    line: int | None
    reason: str


@dataclass
class Translation:
    """A file in Rostra's terms: the config, and an answer to each of its keys.

    `places` tells for each key of the config where in the file it comes from.
    """

    name: str
    lines: Mapping[Key, int]
    ranks: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    translated: list[Answer] = field(default_factory=list)
    needless: list[Answer] = field(default_factory=list)
    refused: list[Answer] = field(default_factory=list)
    places: dict[Key, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what a translation changes, or a slip

    def check(self) -> None:
        """Raises RequestError when a key was refused: file, line, key and reason of each."""
        if self.refused:
            said = [f"{self.place(a.line)}: {a.key}: {a.reason}" for a in self.refused]
            raise RequestError("\n".join(said))

    def place(self, line: int | None) -> str:
        return self.name if line is None else f"{self.name}:{line}"

    def summary(self) -> str:
        """What became of the file, in lines for a person who trains with it as it is."""
        needless = ", ".join(dict.fromkeys(a.key for a in self.needless)) or "nothing"
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        head = f"{self.name}: an Axolotl file, for {ranks}; needless in it: {needless}"
        return "\n".join([head, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """What `rostra migrate --json` prints."""
        kinds = ("translated", "needless", "refused")
        return {"config": self.config} | {
            kind: [vars(answer) for answer in getattr(self, kind)] for kind in kinds
        }


@dataclass(frozen=True)
class Needless:
    """A key that Rostra can do without, and why."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """A key that Rostra has nothing for, and what to do. Unset or switched off, it is needless."""

    reason: str


@dataclass
class Part:
    """A table of the file: the whole of it, or one inside, such as `datasets.0`."""

    into: Translation
    values: dict[str, Any]
    key: Key = ()
    base: str = ""  # the section of the config that it describes
    kind: str = ""  # datasets: the type of source
    # of keys that the file calls otherwise: the name there, and what there is to say of it
    written: dict[str, tuple[str, str]] = field(default_factory=dict)

    def put(self, key: str, path: str, value: Any, note: str = "") -> None:
        """Translate `key` to the dotted `path` of the config."""
        target, *steps = self.into.config, *path.split(".")
        for step, after in pairwise(steps):
            target = _enter(target, step, after)
        if isinstance(target, list):
            target.append(value)
        else:
            target[steps[-1]] = value
        full: Key = tuple(int(s) if s.isdigit() else s for s in steps)
        line = self.line(key)
        if line is not None:
            self.into.places[full] = f"{self.into.place(line)} ({self.dotted(key)})"
        shown = f"{path} = {'null' if value is None else value}"
        note = "; ".join(n for n in (self._written(key)[1], note) if n)
        said = note or ("Axolotl's default" if line is None else "")
        self._add(self.into.translated, key, f"{shown} ({said})" if said else shown)
        if note and line is not None:
            self.into.notes.append(f"{self.into.place(line)}: {self.dotted(key)}: {shown} ({note})")

    def set(self, key: str, name: str, value: Any, note: str = "") -> None:
        """Translate `key` to `name` of the section that this part describes."""
        self.put(key, f"{self.base}.{name}", value, note)

    def merge(self, key: str, reason: str) -> None:
        """`key` is translated together with another one, under whose name the value stands."""
        self._add(self.into.translated, key, reason)

    def needless(self, key: str, reason: str) -> None:
        if self.line(key) is not None:  # a default of Axolotl needs no word
            self._add(self.into.needless, key, reason)

    def refuse(self, key: str, reason: str) -> None:
        self._add(self.into.refused, key, reason)

    def _add(self, answers: list[Answer], key: str, reason: str) -> None:
        answer = Answer(self.dotted(key), self.line(key), reason)
        if answer not in answers:
            answers.append(answer)

    def dotted(self, key: str) -> str:
        return ".".join(map(str, (*self.key, self._written(key)[0])))

    def _written(self, key: str) -> tuple[str, str]:
        return self.written.get(key, (key, ""))

    def line(self, key: str) -> int | None:
        """The line of a key, or of the nearest thing around it; None when it is not in the file."""
        if key not in self.values:
            return None
        full = (*self.key, self._written(key)[0])
        around = (full[:n] for n in range(len(full), 0, -1))
        return next((self.into.lines[at] for at in around if at in self.into.lines), None)

    def on(self, key: str) -> bool:
        """Whether a key is there and says anything."""
        return bool(self.values.get(key))

    def whole(self, key: str, value: Any, least: int = 1) -> int | None:
        """`value` as a whole number, or a refusal."""
        number = self.number(key, value, least)
        if number is not None and number != int(number):
            self.refuse(key, f"should be a whole number, not {value!r}")
            return None
        return None if number is None else int(number)

    def number(self, key: str, value: Any, least: float = 0) -> float | None:
        """`value` as a number of at least `least`, or a refusal."""
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if number >= least:
            return number
        self.refuse(key, f"should be a number of at least {least}, not {value!r}")
        return None


Rule = Callable[[Part, str, Any], None] | Needless | Refused


def _enter(target: Any, step: str, after: str) -> Any:
    """The table or list at `step` of `target`, made when it is not there."""
    empty: Any = [] if after.isdigit() else {}
    if isinstance(target, list):
        if int(step) == len(target):
            target.append(empty)
        return target[int(step)]
    return target.setdefault(step, empty)


def answer(
    part: Part,
    rules: Mapping[str, Rule],
    within: str,
    slips: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Answer every key of `part` by its rule, in the order of the rules.

    `within` names the table in messages. `slips` are wrong names whose meaning is known, and
    `aliases` further names that are right in Axolotl, too.
    """
    notes = {key: f"meant: `{meant}`; {DROP}" for key, meant in (slips or {}).items()}
    names = {**(slips or {}), **(aliases or {})}
    for key, meant in names.items():
        if key in part.values and part.values.get(meant) is None:
            part.written[meant] = (key, notes.get(key, ""))
            part.values[meant] = part.values.pop(key)
    order = {key: place for place, key in enumerate(rules)}
    for key in sorted(part.values, key=lambda key: order.get(key, len(order))):
        value = part.values[key]
        if key in rules:
            _apply(rules[key], part, key, value)
        elif key in names:
            part.refuse(key, f"`{names[key]}` is given too, and means the same; remove one of them")
        else:
            part.refuse(key, f"{within} has no such key; {DROP}. {_nearest(key, [*rules, *names])}")


# Keys whose value may be a list or a table; that of all others is one word or number.
TABLES = frozenset(
    "datasets pretraining_dataset special_tokens tokens additional_special_tokens plugins "
    "lr_scheduler_kwargs bnb_config_kwargs selective_checkpointing deepspeed fsdp fsdp_config "
    "lora_target_modules lora_modules_to_save type data_files message_property_mappings roles "
    "roles_to_train".split()
)


def _apply(rule: Rule, part: Part, key: str, value: Any) -> None:
    if value is None or value in ("", [], {}):
        part.needless(key, "empty: as if it were not there")
    elif isinstance(rule, Needless):
        part.needless(key, rule.reason)
    elif not isinstance(rule, Refused):
        if isinstance(value, list | dict) and key not in TABLES:
            part.refuse(key, f"should be one word or number, not {value!r}")
        else:
            rule(part, key, value)
    elif value in (False, "no", "none"):
        part.needless(key, "switched off")
    else:
        part.refuse(key, rule.reason)


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.7)
    return f"Did you mean `{near[0]}`?" if near else "Remove it"


def to(path: str, note: str = "") -> Rule:
    """The rule of a key that is the same thing under another name."""
    return lambda part, key, value: part.put(key, path, value, note)


Groups = tuple[tuple[str, str], ...]  # a reason, and "key key …"


def every(groups: Groups, kind: type[Needless] | type[Refused]) -> dict[str, Rule]:
    """A rule for each key."""
    return {key: kind(reason) for reason, keys in groups for key in keys.split()}
