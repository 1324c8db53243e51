"""The local cache: files of a store kept on this machine, by the hash of their content."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rostra.config.loading import LoadTable
from rostra.data.mapping import BadContent, Content, MappedFiles, lock, remove_unused
from rostra.errors import RequestError
from rostra.files import file_at, open_range

TRIES = 3  # of a download, beside the tries that each request to a store has
PAUSE = 0.5  # seconds, longer each time
CHUNK = 1 << 20
LOCK, ASIDE = ".lock", ".aside"
OURS = re.compile(rf"[0-9a-f]{{64}}|\.[0-9a-f]{{64}}\{ASIDE}")  # all else there is not touched
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheFull(RequestError):
    """What is in the cache is in use, and there is no room for more."""


class LocalCache:
    """Files of stores in a folder of this machine, at most `max_bytes` of them.

    All processes of the machine share the folder. A file's name there is the SHA-256 of its
    content, and it gets the name when it is complete and hashed; each process hashes it again
    before its own first use. One process downloads a file, the others wait for it; a killed one
    lets go. Files go that were not asked for the longest, but none that a process has mapped.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._files = MappedFiles()

    @classmethod
    def of(cls, load: LoadTable) -> LocalCache:
        """As `data.load` has it; the folder is else ROSTRA_CACHE/shards, else
        ~/.cache/rostra/shards."""
        default = Path(os.environ.get("ROSTRA_CACHE") or "~/.cache/rostra", "shards")
        return cls(Path(load.cache or default).expanduser(), load.cache_bytes)

    def map(self, url: str, sha256: str, size: int) -> Content:
        """The content of `url`, from the cache or downloaded now.

        Raises:
            CacheFull: when all that could go is in use.
            RequestError: when it cannot be had, or comes broken again and again; when it is
                larger than the cache; when the disk is full.
        """
        if (content := self._look(sha256)) is not None:
            return content
        if size > self.max_bytes:
            raise RequestError(
                f"{url} has {size:,} bytes, and the cache may have {self.max_bytes:,}: raise "
                "data.load.cache_bytes, several times that at the least"
            )
        self._make_folder()
        with self._alone(sha256[:2]):
            if (content := self._look(sha256)) is not None:  # by another process, as we waited
                return content
            self._path(sha256).unlink(missing_ok=True)  # rotten
            return self._download(url, sha256, size)

    def _path(self, sha256: str) -> Path:
        return self.folder / sha256

    def _look(self, sha256: str) -> Content | None:
        """What the cache has, if it is whole."""
        path = self._path(sha256)
        try:
            content = self._files.map(path, sha256)
        except (OSError, BadContent):
            return None
        with contextlib.suppress(OSError):  # used now; the time of change stays
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return content

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One process (and thread) at a time inside; a killed one lets go."""
        with self._path(f".{what}{LOCK}").open("wb") as file:
            lock(file.fileno(), fcntl.LOCK_EX)
            yield

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"{self.folder}: cannot be made ({error.strerror}). Choose another folder for "
                "downloaded shards with data.load.cache."
            ) from error

    def _download(self, url: str, sha256: str, size: int) -> Content:
        for number in range(TRIES):
            time.sleep(PAUSE * number)
            with self._room(sha256, size) as (aside, file):
                try:
                    _copy(url, size, file)
                    content = self._files.map(aside, sha256)
                    with self._alone("room"):  # who counts sees it under one of its names
                        aside.replace(self._path(sha256))
                    return content
                except BadContent:
                    broken = "it has not the SHA-256 that the manifest names"
                except OSError as error:
                    if error.errno in FULL:
                        raise
                    broken = error.strerror or str(error)
        raise RequestError(
            f"{url}: came broken {TRIES} times ({broken}). If it is so in the store, delete it "
            "and start the same command again: the data is then prepared anew."
        )

    @contextlib.contextmanager
    def _room(self, sha256: str, size: int) -> Iterator[tuple[Path, BinaryIO]]:
        """A file to download into, which has all its room on the disk already, and counts."""
        aside = self._path(f".{sha256}{ASIDE}")
        try:
            with contextlib.ExitStack() as stack:
                with self._alone("room"):
                    self._evict(size)
                    file = stack.enter_context(aside.open("wb"))
                    lock(file.fileno(), fcntl.LOCK_SH)  # in use, as all in the cache that is so
                    if size:
                        os.posix_fallocate(file.fileno(), 0, size)
                yield aside, file
        except OSError as error:
            if error.errno not in FULL:
                raise
            free = shutil.disk_usage(self.folder).free
            raise RequestError(
                f"{self.folder}: the disk is full ({free:,} bytes free, {size:,} are needed). "
                "Free some space, lower data.load.cache_bytes, or choose another folder with "
                "data.load.cache; then start the same command again."
            ) from error
        finally:
            aside.unlink(missing_ok=True)

    def _evict(self, needed: int) -> None:
        """Make room: what the killed left goes first, then what was used longest ago."""
        found = sorted(self._entries())
        total = sum(size for *_, size, _ in found)
        for *_, size, path in found:
            if total + needed <= self.max_bytes:
                return
            if remove_unused(path):
                total -= size
        if total + needed > self.max_bytes:
            raise CacheFull(
                f"{self.folder}: all {total:,} bytes there are in use by running processes, and "
                f"{needed:,} more would pass the bound of {self.max_bytes:,}: raise "
                "data.load.cache_bytes"
            )

    def _entries(self) -> Iterator[tuple[bool, int, int, Path]]:
        """Whether complete, time of last use, size, and path of each file in the cache."""
        for entry in os.scandir(self.folder):
            if OURS.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # renamed since it was listed
                    state = entry.stat()
                    complete = not entry.name.endswith(ASIDE)
                    yield complete, state.st_atime_ns, state.st_size, Path(entry.path)


def _copy(url: str, size: int, file: BinaryIO) -> None:
    found = file_at(url)
    if found.size != size:
        raise OSError(errno.EIO, f"it has {found.size:,} bytes, not the {size:,} of the manifest")
    with open_range(found) as source:
        shutil.copyfileobj(source, file, CHUNK)
    file.flush()
