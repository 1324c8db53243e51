"""The text that every machine with Python has: documentation topics and library sources."""

from __future__ import annotations

import io
import os
import pydoc_data.topics
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rostra.config.sources import PythonDocsSource
from rostra.data.sources import BadRecords, Document, Part, Reader
from rostra.files import file_at

TOPICS = "topics"
# Not of the library itself, or the topics again, or tests (full of undecodable and odd text).
EXCLUDED = {"site-packages", "dist-packages", "pydoc_data", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class PythonDocsReader(Reader):
    """Ids are `topics/NAME` and paths below the library, wherever Python is installed.

    What does not decode, or is empty, is passed over: it is not the user's mistake.
    """

    source: PythonDocsSource
    kind: ClassVar[str] = "python_docs"

    def parts(self, bad: BadRecords) -> list[Part]:
        library = Path(sysconfig.get_path("stdlib"))
        modules = sorted((path.relative_to(library).as_posix(), path) for path in _modules(library))
        topics = Part(TOPICS, file_at(pydoc_data.topics.__file__))
        return [topics, *(Part(name, file_at(str(path))) for name, path in modules)]

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        if part.name == TOPICS:
            for name, text in sorted(pydoc_data.topics.topics.items()):
                yield Document(f"{TOPICS}/{name}", text)
        elif text := _source(Path(part.file.url)):
            yield Document(part.name, text)


def _modules(library: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in EXCLUDED]
        yield from (Path(root, name) for name in files if name.endswith(".py"))


def _source(path: Path) -> str:
    """A module's text, decoded as PEP 263 says; empty when it cannot be."""
    try:
        raw = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = io.TextIOWrapper(io.BytesIO(raw), encoding).read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
    return text if text.strip() and "\0" not in text else ""
