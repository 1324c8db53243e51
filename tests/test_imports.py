"""A package imports only from rows below its own; packages in a row never import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROWS = [
    ["errors", "layout", "lazy"],
    ["config", "events", "files", "store", "memory", "batch", "pieces"],
    ["hardware", "models", "optim", "track", "report", "workers"],
    ["parallel", "data", "adapt"],
    ["build", "checkpoint"],
    ["dry_run", "generate"],
    ["evaluate", "plan"],
    ["train", "export"],
    ["verify"],
    ["api"],
    ["cli"],
]
ROW = {package: index for index, row in enumerate(ROWS) for package in row}
SOURCE = Path(__file__).parent.parent / "src" / "rostra"
FILES = sorted(SOURCE.rglob("*.py"))


def packages_imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("rostra."):
                yield name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if package == "__init__":  # hands out names, on first use
        return
    for imported in packages_imported(path):
        if imported != package:
            assert ROW[imported] < ROW[package], f"{package} imports {imported}"


def test_every_package_has_its_row() -> None:
    found = {p.relative_to(SOURCE).parts[0].removesuffix(".py") for p in FILES}
    assert found - {"__init__"} == set(ROW)


def test_help_comes_at_once_and_loads_nothing_heavy() -> None:
    program = (
        "import sys, rostra.cli; print({'torch', 'transformers', 'pydantic'} & set(sys.modules))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "set()"
    best = min(_help_seconds() for _ in range(3))
    assert best < 0.5


def _help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "rostra.cli", "--help"], check=True, capture_output=True)
    return time.perf_counter() - began
