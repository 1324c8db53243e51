"""Rostra trains language models on whatever hardware there is, from one YAML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rostra.lazy import on_first_use

if TYPE_CHECKING:
    from rostra.api import Run
    from rostra.config import Config
    from rostra.errors import RequestError, RostraError
    from rostra.generate import Sampling

__all__ = ["Config", "RequestError", "RostraError", "Run", "Sampling"]

_HOME = {
    "Config": "rostra.config",
    "RequestError": "rostra.errors",
    "RostraError": "rostra.errors",
    "Run": "rostra.api",
    "Sampling": "rostra.generate",
}

__getattr__ = on_first_use(__name__, _HOME)
