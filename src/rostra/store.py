"""Files: hashes, commits that are whole or absent, the lock and the folder of a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec
import psutil

from rostra.errors import RequestError

MANIFEST = "manifest.json"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn "no space left" into a message that says where, and what is safe."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(path) from error
        raise
    except Exception as error:  # libraries in Rust or C++ carry the errno in their text only
        if any(os.strerror(code) in str(error) for code in _FULL):
            raise disk_full(path) from error
        raise


def disk_full(path: Path) -> RequestError:
    where = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(where).free
    return RequestError(
        f"{path}: cannot write, the disk is full ({free:,} bytes free). What was complete "
        "before is kept. Free some space, or choose another folder with run.output or "
        "data.cache, then start the same command again."
    )


def open_file(path: str, mode: str = "rb", **options: Any) -> IO[Any]:
    """Open a local path or any URL that fsspec knows."""
    return fsspec.open(path, mode, **options).open()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a small file so that readers see the old content or the new, never a part."""
    aside = _aside(path)
    data = content.encode() if isinstance(content, str) else content
    with explain_full_disk(path):
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    _sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_file(path, json.dumps(value, indent=2) + "\n")


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _aside(path: Path) -> Path:
    """Where `path` is written before it is complete: named after the process that writes."""
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.aside")


def secure_file(path: Path) -> dict[str, Any]:
    """Sync a file to the disk; its SHA-256 and size, as a manifest has them."""
    _sync(path)
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size}


@contextlib.contextmanager
def commit_folder(
    path: Path, secured: Mapping[str, dict[str, Any]] | None = None, **manifest: Any
) -> Iterator[Path]:
    """A folder that appears at `path` complete or not at all.

    Yields a folder aside to write into. On leaving it, every file is hashed and synced, the
    manifest (SHA-256 and size of each file, plus `manifest`) is written last, and the folder
    is renamed into place. On an error nothing is left. `secured` has, by then, the
    records of files that were hashed and synced as they were written; these are not read again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    with explain_full_disk(path):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            yield aside
            known = secured or {}  # a listing may not show yet what other machines wrote
            names = {str(p.relative_to(aside)) for p in aside.rglob("*") if p.is_file()}
            files = {n: known.get(n) or secure_file(aside / n) for n in sorted(names | set(known))}
            write_json(aside / MANIFEST, {**manifest, "files": files})
            for folder in (p for p in aside.rglob("*") if p.is_dir()):
                _sync(folder)
            if path.exists():  # an older or a broken one
                remove_folder(path)
            aside.rename(path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    _sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a committed folder; killed in the middle, it is gone all the same."""
    gone = _aside(path.with_name(f"{path.name}-removed"))
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def sweep(folder: Path) -> None:
    """Remove what killed processes of this machine left aside in `folder`."""
    for left in folder.glob(".*.aside"):
        host, process = left.name.split(".")[-3:-1]
        if host == _host() and process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a committed folder; None when there is none, so not complete."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return manifest
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def broken_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Files of `folder` that are missing or whose hash is not the manifest's."""
    return [
        name
        for name, file in manifest["files"].items()
        if not (folder / name).is_file()
        or (folder / name).stat().st_size != file["bytes"]
        or sha256_file(folder / name) != file["sha256"]
    ]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time inside, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Lock:
    """One owner at a time for a folder: a file with host, process and start time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock.json"
        self.notice: str | None = None  # said when a stale lock was taken over

    def __enter__(self) -> Lock:
        mine = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with _alone(self.path.parent):
            self._judge(mine["host"])
            write_json(self.path, mine)
        return self

    def _judge(self, host: str) -> None:
        """Remove the lock there is when its owner is dead; refuse otherwise."""
        try:
            owner = json.loads(self.path.read_text())
        except FileNotFoundError:
            return
        except json.JSONDecodeError:  # a machine went down while it was written
            owner = {"process": "?", "host": host, "since": "?", "process_started": 0}
        who = f"process {owner['process']} on {owner['host']}, since {owner['since']}"
        if owner["host"] != host:
            raise RequestError(
                f"{self.path.parent}: in use by {who}. If that process is surely gone, "
                f"delete {self.path} and start again."
            )
        with contextlib.suppress(psutil.NoSuchProcess, TypeError):
            process = psutil.Process(owner["process"])
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and abs(process.create_time() - owner["process_started"]) < 1:
                raise RequestError(
                    f"{self.path.parent}: in use by {who}. Wait for it, stop it, or choose "
                    "another folder with run.output."
                )
        self.notice = f"took over the lock of {who}, which is no longer running"
        self.path.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class RunFolder:
    """Where the parts of a run are."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        found = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        names = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in found)
        return sorted(int(m[1]) for m, path in names if m and (path / MANIFEST).exists())

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"
