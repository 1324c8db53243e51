"""Names that a package hands out and imports when they are asked for: `rostra --help` must not
wait for PyTorch, nor a process that prepares data for what trains."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def on_first_use(package: str, home: dict[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: `home` says in which module each name lives."""

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return get
