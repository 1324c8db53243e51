"""Files on any store: local paths and every URL that fsspec knows, with retries and backoff.

A `File` is what a listing says of it: where it is, its size, its version. Reading one gives
exactly that version, or an error that names it.
"""

from __future__ import annotations

from rostra.files.listing import File, file_at, find_files, walk
from rostra.files.reading import open_range
from rostra.files.stores import Retries, is_url, join, local_path
from rostra.files.transfer import (
    exists,
    fetch,
    hash_file,
    put,
    put_bytes,
    put_new,
    read_bytes,
    remove,
)

__all__ = [
    "File",
    "Retries",
    "exists",
    "fetch",
    "file_at",
    "find_files",
    "hash_file",
    "is_url",
    "join",
    "local_path",
    "open_range",
    "put",
    "put_bytes",
    "put_new",
    "read_bytes",
    "remove",
    "walk",
]
