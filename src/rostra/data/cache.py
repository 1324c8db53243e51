"""Where prepared data is kept: under a key made from content, written by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rostra.config.data import DataSection
from rostra.data.sources import Part
from rostra.errors import RequestError
from rostra.store import sha256_file, write_json

# A file that changed less than this ago may change again without its times telling.
_FRESH_NS = 2_000_000_000


def cache_folder(data: DataSection) -> Path:
    """`data.cache`, else ROSTRA_CACHE, else ~/.cache/rostra."""
    named = data.cache or os.environ.get("ROSTRA_CACHE") or "~/.cache/rostra"
    return Path(named).expanduser()


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, the same for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class ContentHashes:
    """SHA-256 of parts; a memo of files by size and times spares reading unchanged ones again."""

    def __init__(self, memo: Path) -> None:
        self._path = memo
        self._old: dict[str, list[Any]] = {}
        with contextlib.suppress(OSError, ValueError):  # a broken memo is no memo
            kept = json.loads(memo.read_text())
            if isinstance(kept, dict) and kept.get("digest") == digest(kept.get("files")):
                self._old = kept["files"]
        self._new: dict[str, list[Any]] = {}
        self._started = time.time_ns()
        self.fingerprints: list[tuple[Part, tuple[int, int, int] | None]] = []

    def hash(self, part: Part) -> str | None:
        """The hash of a part's file; None when it cannot be read (reading it will say why)."""
        fingerprint = part.fingerprint()
        self.fingerprints.append((part, fingerprint))
        if fingerprint is None:
            return None
        path = str(part.path.absolute())
        if (known := self._old.get(path)) and known[:-1] == list(fingerprint):
            sha256 = str(known[-1])
        else:
            try:
                sha256 = sha256_file(part.path)
            except OSError:
                return None
        if max(fingerprint[1:]) < self._started - _FRESH_NS:
            self._new[path] = [*fingerprint, sha256]
        return sha256

    def save(self) -> None:
        """Keep the memo where it can be kept; it only saves time."""
        if self._new != self._old:
            with contextlib.suppress(OSError, RequestError):
                write_json(self._path, {"files": self._new, "digest": digest(self._new)})

    def check_unchanged(self) -> None:
        """Raises RequestError when a part was changed since it was hashed."""
        for part, fingerprint in self.fingerprints:
            if part.fingerprint() != fingerprint:
                raise RequestError(
                    f"{part.path}: changed while it was read. Start the same command again once "
                    "nothing writes to it."
                )


@contextlib.contextmanager
def one_at_a_time(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`, waiting for whoever holds it; a killed holder lets go.

    Where the file system has no locks, all go on at once, which is slower but still right:
    folders are committed whole.
    """
    while True:
        descriptor = _create(path)
        try:
            _lock(descriptor, waiting)
            if _is_still(path, descriptor):  # else its last holder removed it as we waited
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def _create(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RequestError(
            f"{path.parent}: nothing can be written in this folder ({error.strerror}). Choose "
            "another for prepared data with data.cache."
        ) from error


def _lock(descriptor: int, waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
