"""Rostra trains language models on whatever hardware there is, from one YAML file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Import on first use: `rostra --help` must not wait for PyTorch."""
    if name not in _HOME:
        raise AttributeError(f"module 'rostra' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
