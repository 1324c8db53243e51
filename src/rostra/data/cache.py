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
from rostra.files import hash_file, is_url
from rostra.store import write_json

# A file that changed less than this ago may change again without its times telling.
_FRESH_NS = 2_000_000_000


def cache_folder(data: DataSection) -> Path:
    """The local one: `data.cache`, else (or if that is a URL) ROSTRA_CACHE, else
    ~/.cache/rostra."""
    named = data.cache if data.cache and not is_url(data.cache) else None
    named = named or os.environ.get("ROSTRA_CACHE") or "~/.cache/rostra"
    return Path(named).expanduser()


def cache_place(data: DataSection) -> str:
    """Where prepared data is kept: a path, or the URL of `data.cache`."""
    return data.cache if data.cache and is_url(data.cache) else str(cache_folder(data))


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, the same for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class ContentHashes:
    """Names for the content of parts: the SHA-256 of a local file, with a memo by size and times
    that spares reading unchanged ones again; of a remote one, the version that its store gives.
    """

    def __init__(self, memo: Path) -> None:
        self._path = memo
        self._old: dict[str, list[Any]] = {}
        with contextlib.suppress(OSError, ValueError):  # a broken memo is no memo
            kept = json.loads(memo.read_text())
            if isinstance(kept, dict) and kept.get("digest") == digest(kept.get("files")):
                self._old = kept["files"]
        self._new: dict[str, list[Any]] = {}
        self._started = time.time_ns()
        self._found: dict[str, str | None] = {}  # of files: many parts may be of one
        self._fingerprints: dict[str, tuple[Part, Any]] = {}

    def hash(self, part: Part) -> str | None:
        """The name of a part's file; None when it cannot be read (reading it will say why)."""
        file = part.file.url
        if file not in self._found:
            self._found[file] = self._hash(part)
        return self._found[file]

    def _hash(self, part: Part) -> str | None:
        fingerprint = part.fingerprint()
        self._fingerprints[part.file.url] = part, fingerprint
        if fingerprint is None:
            return None
        if part.file.local is None and part.file.version:  # no other version can be read
            return digest([part.file.size, part.file.version])
        path = part.file.url if part.file.local is None else str(part.file.local.absolute())
        if (known := self._old.get(path)) and known[:-1] == list(fingerprint):
            sha256 = str(known[-1])
        else:
            try:
                sha256 = hash_file(part.file)
            except OSError:
                return None
        if part.file.local and max(map(int, fingerprint[1:])) < self._started - _FRESH_NS:
            self._new[path] = [*fingerprint, sha256]
        return sha256

    def save(self) -> None:
        """Keep the memo where it can be kept; it only saves time."""
        if self._new != self._old:
            with contextlib.suppress(OSError, RequestError):
                write_json(self._path, {"files": self._new, "digest": digest(self._new)})

    def check_unchanged(self) -> None:
        """Raises RequestError when a file was changed since it was hashed."""
        for part, fingerprint in self._fingerprints.values():
            if part.fingerprint() != fingerprint:
                raise RequestError(
                    f"{part.where}: changed while it was read. Start the same command again once "
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
