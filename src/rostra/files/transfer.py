"""Whole files to and from stores."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from rostra.files.listing import File, file_at
from rostra.files.reading import STREAM_BUFFER, open_range
from rostra.files.stores import RETRIES, is_url, local_path, status_of, store_of

_THERE_ALREADY = (409, 412)  # written at the same time, or before


def read_bytes(url: str) -> bytes:
    """All of a small file. Raises as `file_at` and `open_range`."""
    with open_range(file_at(url)) as source:
        return source.read()


def fetch(url: str, to: Path) -> None:
    """Copy a file to the local path `to`, which appears complete or not at all.

    Raises as `file_at` and `open_range`.
    """
    with _complete(to) as aside, open_range(file_at(url)) as source, aside.open("wb") as target:
        shutil.copyfileobj(source, target, STREAM_BUFFER)


def put(path: Path, url: str) -> None:
    """Copy a local file to a URL (or a local path), where it appears complete or not at all.

    Raises:
        OSError: when it may not be written there.
        RequestError: when the store does not answer.
    """
    if is_url(url):
        fs, inside = store_of(url)
        RETRIES.call(url, lambda: fs.put_file(str(path), inside))
        return
    with _complete(local_path(url)) as aside:
        shutil.copyfile(path, aside)


def put_bytes(data: bytes, url: str) -> None:
    """Write a small file, complete or not at all. Raises as `put`."""
    if is_url(url):
        fs, inside = store_of(url)
        RETRIES.call(url, lambda: fs.pipe_file(inside, data))
        return
    with _complete(local_path(url)) as aside:
        aside.write_bytes(data)


def put_new(data: bytes, url: str) -> bool:
    """Write a small file unless there is one already: whether it was written. Of several that
    do so at once one succeeds, where the store knows conditional writes (S3, GCS, Azure).

    Raises as `put`.
    """
    if not is_url(url):
        path = local_path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), path.open("xb") as file:
            file.write(data)
            return True
        return False
    fs, inside = store_of(url)

    def create() -> bool:
        try:
            fs.pipe_file(inside, data, mode="create")
        except OSError as error:
            if isinstance(error, FileExistsError) or status_of(error) in _THERE_ALREADY:
                return False
            raise
        return True

    return RETRIES.call(url, create)


def exists(url: str) -> bool:
    """Whether there is a file. Raises as `file_at`, when that cannot be told."""
    try:
        file_at(url)
    except FileNotFoundError:
        return False
    return True


def remove(url: str) -> None:
    """Remove a file, or a folder with all that is in it; nothing when it is not there.

    Raises:
        OSError: when it may not be removed.
        RequestError: when the store does not answer.
    """
    if not is_url(url):
        path = local_path(url)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return
    fs, inside = store_of(url)
    fs.invalidate_cache()
    with contextlib.suppress(FileNotFoundError):
        RETRIES.call(url, lambda: fs.rm(inside, recursive=True))


def hash_file(file: File) -> str:
    """The SHA-256 of a file's content, in hexadecimal. Raises as `open_range`."""
    with open_range(file) as source:
        return hashlib.file_digest(cast(io.BufferedReader, source), "sha256").hexdigest()


@contextlib.contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.aside")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
