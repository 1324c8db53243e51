"""Folders that work in progress and its result lie in: on a disk, or on a store.

A file appears under its name whole or not at all, so several processes may write the same one:
what they write is the same. Folders are plain values, so that other processes can use them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rostra import files
from rostra.files.stores import store_of
from rostra.store import MANIFEST, remove_folder, secure_file, sha256_file, sweep, write_file


class Folder(Protocol):
    """What a folder can do, wherever it lies."""

    @property
    def place(self) -> str:
        """Its path or URL."""

    def below(self, name: str) -> Folder:
        """A folder in it."""

    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """A local folder to write files in, which is removed afterwards."""

    def take(self, path: Path, name: str) -> dict[str, Any]:
        """Move a finished file of `scratch` here; its SHA-256 and size, as a manifest has them."""

    def fetch(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A local file with the content of one that is here."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None when there is none."""

    def names(self, folder: str) -> set[str]:
        """The files right below `folder`, as `read` takes them."""

    def remove(self) -> None:
        """Remove it with all that is in it."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder of the file system."""

    path: Path

    @property
    def place(self) -> str:
        return str(self.path)

    def below(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        self.path.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=".scratch-", dir=self.path))  # files move by renaming
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def take(self, path: Path, name: str) -> dict[str, Any]:
        secured = secure_file(path)
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
        return secured

    @contextlib.contextmanager
    def fetch(self, name: str) -> Iterator[Path]:
        yield self.path / name

    def write(self, name: str, content: bytes) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, content)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str) -> set[str]:
        found = self.path / folder
        if not found.is_dir():
            return set()
        return {f"{folder}/{path.name}" for path in found.iterdir() if path.name[0] != "."}

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class StoreFolder:
    """A prefix of an object store, or any other URL that fsspec can write to."""

    place: str

    def below(self, name: str) -> StoreFolder:
        return StoreFolder(files.join(self.place, name))

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="rostra-") as path:
            yield Path(path)

    def take(self, path: Path, name: str) -> dict[str, Any]:
        secured = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        files.put(path, files.join(self.place, name))
        path.unlink()
        return secured

    @contextlib.contextmanager
    def fetch(self, name: str) -> Iterator[Path]:
        with self.scratch() as folder:
            files.fetch(files.join(self.place, name), folder / "file")
            yield folder / "file"

    def write(self, name: str, content: bytes) -> None:
        files.put_bytes(content, files.join(self.place, name))

    def read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return files.read_bytes(files.join(self.place, name))
        return None

    def names(self, folder: str) -> set[str]:
        with contextlib.suppress(FileNotFoundError):
            found = files.find_files(files.join(self.place, folder))
            return {f"{folder}/{name}" for name, _ in found}
        return set()

    def remove(self) -> None:
        store, path = store_of(self.place)
        with contextlib.suppress(FileNotFoundError):
            store.rm(path, recursive=True)


def folder_at(place: str) -> Folder:
    """The folder with this path or URL."""
    return StoreFolder(place) if files.is_url(place) else LocalFolder(Path(place))


def commit(result: Folder, place: str, manifest: str) -> None:
    """Make `result` the one at `place`: with its manifest, which is written last.

    On a store it is there already; what others may have committed meanwhile is the same.
    """
    if isinstance(result, LocalFolder):
        sweep(result.path)
        write_file(result.path / MANIFEST, manifest)
        if Path(place).exists():  # a broken one, or of another version
            remove_folder(Path(place))
        result.path.rename(place)
    else:
        result.write(MANIFEST, manifest.encode())


def write_json(where: Folder, name: str, value: Any) -> None:
    where.write(name, json.dumps(value).encode())


def read_json(where: Folder, name: str) -> Any:
    """The value of a JSON file; None when there is none, or it is broken."""
    try:
        return json.loads(where.read(name) or b"null")
    except ValueError:
        return None
