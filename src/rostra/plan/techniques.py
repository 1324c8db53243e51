"""What may be allowed beside the choice of a layout: changes of a config that save memory or time
and change what is computed, if only by rounding. A layout never does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from typing import Any

from rostra.config import Config
from rostra.config.tuning import AdapterTable, QuantizationTable
from rostra.errors import RequestError


@dataclass(frozen=True)
class Technique:
    """A change of a config. Of those of one `kind`, a config has one."""

    name: str
    kind: str
    keys: str  # as a config says it
    change: Callable[[Config], Config]


def _section(name: str, **values: Any) -> Callable[[Config], Config]:
    def change(config: Config) -> Config:
        section = getattr(config, name).model_copy(update=values)
        return config.model_copy(update={name: section})

    return change


def _lora(config: Config) -> Config:
    if config.adapter.kind == "lora":
        return config
    return config.model_copy(update={"adapter": AdapterTable(kind="lora")})


def _qlora(config: Config) -> Config:
    if config.quantization.kind == "none":
        config = config.model_copy(update={"quantization": QuantizationTable(kind="nf4")})
    return _lora(config)


def _in_backward(config: Config) -> Config:
    config = _section("memory", optimizer_in_backward=True)(config)
    return _section("stability", clip=None)(config)


def _states(kind: str) -> Technique:
    name, keys = f"{kind.replace('_', '-')}-states", f"memory.optimizer_states: {kind}"
    return Technique(name, "states", keys, _section("memory", optimizer_states=kind))


TECHNIQUES: dict[str, Technique] = {
    technique.name: technique
    for technique in (
        Technique("lora", "tuning", "adapter: lora", _lora),
        Technique("qlora", "tuning", "adapter: lora, quantization: nf4", _qlora),
        *map(_states, ("int8", "int4", "fp8", "paged_int8")),
        Technique(
            "bf16-pure", "precision", "precision.compute: bf16_pure",
            _section("precision", compute="bf16_pure"),
        ),
        Technique(
            "fp16", "precision", "precision.compute: fp16", _section("precision", compute="fp16"),
        ),
        Technique(
            "fp8", "precision", "precision.compute: fp8", _section("precision", compute="fp8"),
        ),
        Technique(
            "bf16-reduction", "reduction", "precision.reduction: bf16",
            _section("precision", reduction="bf16"),
        ),
        Technique(
            "in-backward", "backward",
            "memory.optimizer_in_backward: true, stability.clip: null", _in_backward,
        ),
        Technique("compile", "compile", "train.compile: true", _section("train", compile=True)),
    )
}  # fmt: skip
_OTHER_NAMES = {"8-bit": "int8-states", "8bit": "int8-states", "4-bit-states": "int4-states"}


def techniques_of(names: Iterable[str]) -> tuple[Technique, ...]:
    """Those of `names`; several may stand in one, with commas between. Raises RequestError for
    one that is not there, with the nearest."""
    asked = [part.strip() for name in names for part in name.split(",") if part.strip()]
    found = []
    for name in asked:
        plain = name.lower().replace("_", "-")
        plain = _OTHER_NAMES.get(plain, plain)
        if plain not in TECHNIQUES:
            near = [x for x in TECHNIQUES if x.startswith(plain)]
            near = near or get_close_matches(plain, TECHNIQUES, 2)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise RequestError(
                f"--allow {name}: no technique of that name; {meant}there are "
                f"{', '.join(TECHNIQUES)}"
            )
        found.append(TECHNIQUES[plain])
    return tuple(dict.fromkeys(found))


def adds(technique: Technique, config: Config) -> bool:
    """Whether it changes `config`, and can: adapters train beside a model that has learned."""
    if technique.kind == "tuning" and config.model.pretrained is None:
        return False
    return technique.change(config) != config


def variants(
    config: Config, allowed: Iterable[Technique]
) -> Iterator[tuple[tuple[Technique, ...], Config]]:
    """Every config that `allowed` makes of this one, each with the techniques it uses; first
    the config itself. Those that change nothing are left out."""
    kinds: dict[str, list[Technique | None]] = {}
    for technique in (x for x in allowed if adds(x, config)):
        kinds.setdefault(technique.kind, [None]).append(technique)
    seen: list[Config] = []
    for chosen in product(*kinds.values()):
        used = tuple(technique for technique in chosen if technique is not None)
        changed = config
        for technique in used:
            changed = technique.change(changed)
        if changed not in seen:
            seen.append(changed)
            yield used, changed
