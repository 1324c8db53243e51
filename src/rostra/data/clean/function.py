"""A user's own function as a filter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rostra.config.cleaning import FunctionTable
from rostra.data.clean.page import Page, Reason
from rostra.errors import RequestError

KEY = "data.clean.function"
Function = Callable[[str, dict[str, Any]], bool | str | None]


def load(table: FunctionTable, folder: Path) -> Function:
    """The function; this runs the file, which lies in `folder` if its path is relative.

    Raises:
        RequestError: when the file cannot be read or run, or holds no such function.
    """
    path = folder / table.file
    spec = importlib.util.spec_from_file_location("rostra_user_filter", path)
    if spec is None or spec.loader is None:
        raise RequestError(f"{KEY}.file: {path}: is no Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RequestError(
            f"{KEY}.file: {path}: cannot be run: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, table.name, None)
    if not callable(found):
        named = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise RequestError(
            f"{KEY}.name: {path} holds no function {table.name!r}; it holds "
            f"{', '.join(named) or 'none'}"
        )
    return found


def apply(page: Page, function: Function, name: str) -> Reason | None:
    """Let a user's function judge or change a document.

    Raises:
        RequestError: when it raises, or returns neither bool, str nor None.
    """
    try:
        found = function(page.text, dict(page.metadata))
    except Exception as error:
        raise RequestError(
            f"{KEY}: {name} raised {type(error).__name__}: {error}, on the text that begins "
            f"{page.text[:60]!r}"
        ) from error
    if isinstance(found, str):
        page.replace(found)
    elif found is None or found is False:
        return Reason(name)
    elif found is not True:
        raise RequestError(
            f"{KEY}: {name} returned a {type(found).__name__}; return True to keep the text, "
            "another text to go on with, False or None to reject it"
        )
    return None
