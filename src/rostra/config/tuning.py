"""The sections of fine-tuning: adapters, and quantised bases."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rostra.config.base import Count, Fraction, Section


def _named(value: Any) -> Any:
    """`adapter: lora` as `adapter: {kind: lora}`."""
    if isinstance(value, dict):  # from here on pydantic takes JSON's lists no longer for tuples
        return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return {"kind": value} if isinstance(value, str) else value


ALL = "all-linear"


class AdapterTable(Section):
    """What is trained beside a frozen model. Saved as peft saves it."""

    kind: Literal["none", "lora", "prompt", "prefix", "ia3"] = "none"
    pretrained: str | None = Field(None, description="a saved adapter to go on with")
    frozen: tuple[str, ...] = Field((), description="saved adapters that act but do not train")
    rank: Count = Field(8, description="lora: of the update's two factors")
    alpha: Annotated[float, Field(gt=0)] = Field(
        16, description="lora: the update counts alpha / rank times"
    )
    dropout: Fraction = Field(0.0, description="lora: of what enters the update")
    targets: str | tuple[str, ...] | None = Field(
        None,
        description="lora, ia3: names of modules, or one pattern of their whole names; all-linear, "
        "lora's default and also one of the names, is every linear layer but the head. lora: "
        "embeddings and head too",
    )
    rslora: bool = Field(False, description="lora: alpha / sqrt(rank) times instead")
    dora: bool = Field(False, description="lora: magnitudes are trained beside directions")
    lora_plus_ratio: Annotated[float, Field(gt=0)] | None = Field(
        None, description="lora: B learns so many times as fast as A (LoRA+)"
    )
    modules_to_save: tuple[str, ...] = Field((), description="modules that are trained whole")
    virtual_tokens: Count = Field(20, description="prompt, prefix: positions that are learned")
    prompt: str | None = Field(None, description="prompt: the text that it begins as")

    @property
    def all_linear(self) -> bool:
        """Whether `targets` takes in every linear layer of the body; so it is where none are
        named."""
        targets = self.targets or ALL
        return targets == ALL if isinstance(targets, str) else ALL in targets

    def aims_at(self, module: str) -> bool:
        """Whether `targets` names the module of this whole name, all-linear apart."""
        targets = self.targets or ()
        if isinstance(targets, str):
            return targets != ALL and re.fullmatch(targets, module) is not None
        return any(f".{module}".endswith(f".{target}") for target in targets)

    @field_validator("targets")
    @classmethod
    def _pattern(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"no pattern of names: {error}") from error
        return value

    @model_validator(mode="after")
    def _own_keys(self) -> Self:
        given = {name for name in type(self).model_fields if getattr(self, name) != _plain(name)}
        for kinds, names in _OWN.items():
            if self.kind not in kinds and (odd := sorted(given & set(names))):
                raise ValueError(
                    f"`{odd[0]}` is for kind: {' or '.join(kinds)}, and kind is {self.kind}"
                )
        return self


_OWN = {
    ("lora",): ("rank", "alpha", "dropout", "rslora", "dora", "lora_plus_ratio"),
    ("lora", "ia3"): ("targets", "modules_to_save"),
    ("prompt", "prefix"): ("virtual_tokens",),
    ("prompt",): ("prompt",),
    ("lora", "prompt", "prefix", "ia3"): ("pretrained", "frozen"),
}


def _plain(name: str) -> Any:
    return AdapterTable.model_fields[name].default


class QuantizationTable(Section):
    """A frozen base in few bits (QLoRA: Dettmers et al. 2023, arXiv:2305.14314)."""

    kind: Literal["none", "nf4", "fp4", "int8"] = "none"
    double: bool = Field(True, description="nf4, fp4: the scales are quantised too")
    skip: tuple[str, ...] = Field((), description="names of linear modules that stay as they are")
    cache: bool = Field(True, description="keep a quantised copy on disk for the next start")


AdapterSection = Annotated[AdapterTable, BeforeValidator(_named)]
QuantizationSection = Annotated[QuantizationTable, BeforeValidator(_named)]
