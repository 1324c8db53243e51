"""What all sections of the config are made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """Accept 1e6 where a whole number is meant; YAML reads it as a float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Percent = Annotated[str, Field(pattern=r"^(100|\d{1,2}(\.\d+)?)%$")]
Steps = Whole | Percent  # a number of steps, or a share of the run such as "3%"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
