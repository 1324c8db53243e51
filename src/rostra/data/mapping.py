"""Files mapped into memory, each hashed before its first use."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from pathlib import Path

from rostra.errors import RequestError

Content = mmap.mmap | bytes  # a file's bytes; only an empty file, which has no map, is `bytes`


class BadContent(Exception):
    """A file's content is not what its hash says."""


class MappedFiles:
    """Maps files read-only. A file is hashed once in a process, and again when it has changed.

    While a map lives, its file is locked (shared): a mapping keeps the open file that it was
    made from, and with it the lock, which the system lets go with the last of them, also that
    of a killed process. So whoever gets the exclusive lock knows that nobody uses the file.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, int, int, int, int]] = set()

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[()]]:
        return MappedFiles, ()  # another process hashes for itself

    def map(self, path: Path, sha256: str) -> Content:
        """The content of `path`.

        Raises:
            BadContent: when it is not the one with this hash.
            OSError: when there is no such file, or it cannot be read.
        """
        with path.open("rb") as file:
            lock(file.fileno(), fcntl.LOCK_SH)
            state = os.fstat(file.fileno())
            content: Content = b""
            if state.st_size:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        known = (sha256, state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size)
        if known not in self._known:
            if hashlib.sha256(content).hexdigest() != sha256:
                raise BadContent("it is corrupt: its SHA-256 is another")
            self._known.add(known)
        return content

    def checked(self, path: Path, sha256: str) -> Content:
        """The content of a file of prepared data. Raises RequestError when `map` raises."""
        try:
            return self.map(path, sha256)
        except (OSError, BadContent) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RequestError(
                f"{path}: this file cannot be used ({reason}). Delete it and start the same "
                "command again: the data is then prepared anew."
            ) from error


def lock(descriptor: int, how: int) -> None:
    """flock; where the file system has no locks, none is held.

    Raises:
        BlockingIOError: under LOCK_NB, when others hold it.
    """
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def remove_unused(path: Path) -> bool:
    """Remove a file, unless some process maps it or has it locked otherwise."""
    try:
        with path.open("rb") as file:
            lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True
