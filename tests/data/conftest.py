from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rostra.config.data import DataSection
from support import SHARED_DATA

torch.set_num_threads(1)

WORDS = tuple(
    "the quick brown fox jumps over a lazy dog while rain falls on every quiet harbour".split(" ")
)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Texts that lie beside the repository, where they do."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the texts in {SHARED_DATA}")
    return SHARED_DATA


def essay(number: int, words: int) -> str:
    """Some text, another for every number."""
    chosen = (WORDS[(number * 7 + k * k + k // 5) % len(WORDS)] for k in range(words))
    return f"Essay {number}.\n\n" + " ".join(chosen) + ".\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 60 small text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(essay(number, 40 + number % 9 * 30))
    return folder


@pytest.fixture
def section(tmp_path: Path) -> Callable[..., DataSection]:
    """Makes a data section with a cache of its own: section({"type": "text", ...}, key=value)."""

    def make(*sources: dict[str, Any], **keys: Any) -> DataSection:
        defaults: dict[str, Any] = {
            "tokenizer": {"vocabulary": 320},
            "sequence_length": 32,
            "held_out": 0.2,
            "cache": str(tmp_path / "cache"),
        }
        return DataSection.model_validate({"sources": list(sources), **defaults, **keys})

    return make
