"""The table `data.augment`: variants of prompts, for small sets of examples."""

from __future__ import annotations

import string
from typing import Self

from pydantic import Field, model_validator

from rostra.config.base import Count, Fraction, Section


class AugmentTable(Section):
    """Variants of the examples' prompts; answers stay as they are. Off by default."""

    variants: Count = Field(1, description="of each example; the first is the example itself")
    prompts: tuple[str, ...] = Field(
        (),
        description="other wordings, such as `Please {instruction}`; one that names {input} "
        "takes the input in, and is for examples with one",
    )
    systems: tuple[str, ...] = Field((), description="system prompts in place of an example's own")
    casing: Fraction = Field(
        0.0, description="share of a prompt's words put in lower, upper or title case"
    )
    whitespace: Fraction = Field(0.0, description="share of the gaps between them that are doubled")
    seed: int = Field(0, description="another one gives other variants")

    @model_validator(mode="after")
    def _prompts_are_formats(self) -> Self:
        for prompt in self.prompts:
            try:
                parts = [part[1:] for part in string.Formatter().parse(prompt)]
            except ValueError as error:
                raise ValueError(f"prompts: {prompt!r} is no format ({error})") from error
            plain = all(not spec and not conversion for _, spec, conversion in parts)
            names = {name for name, _, _ in parts} - {None}
            if not plain or "instruction" not in names or names - {"instruction", "input"}:
                raise ValueError(
                    f"prompts: {prompt!r} must name {{instruction}}, and may name {{input}}; "
                    "write {{ and }} for braces"
                )
        return self

    @model_validator(mode="after")
    def _something_varies(self) -> Self:
        if self.variants > 1 and not (
            self.prompts or self.systems or self.casing or self.whitespace
        ):
            raise ValueError(
                f"variants: {self.variants} would all be the same; give `prompts`, `systems`, "
                "`casing` or `whitespace`"
            )
        return self
