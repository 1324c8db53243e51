"""Finding files: a file, a folder or a glob, in the local file system or on a store."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from fsspec.utils import glob_translate

from rostra.errors import RequestError
from rostra.files.stores import RETRIES, is_url, local_path, protocol_of, store_of

Unreadable = Callable[[str, OSError], None]
# What stores say of an object that is another when its content is: in this order.
_VERSIONS = ("ETag", "etag", "generation", "Content-MD5", "md5", "Last-Modified", "LastModified",
             "last_modified", "updated", "mtime", "modified", "created")  # fmt: skip


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was found.

    Attributes:
        url: its URL, or its local path.
        size: in bytes.
        version: another when the content is: the store's ETag or generation, or times; empty
            when nothing is known.
    """

    url: str
    size: int
    version: str

    @property
    def local(self) -> Path | None:
        """Its path in the local file system; None on a store."""
        return None if is_url(self.url) else Path(self.url)

    @property
    def name(self) -> str:
        """The last part of its path."""
        path = urlsplit(self.url).path if protocol_of(self.url).startswith("http") else self.url
        return path.rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        """What `name` ends with, in small letters: .txt, or .gz of a.jsonl.gz."""
        return PurePosixPath(self.name).suffix.lower()


def find_files(
    path: str, suffixes: tuple[str, ...] = (), unreadable: Unreadable | None = None
) -> Iterator[tuple[str, File]]:
    """The files that `path` (a file, a folder, or a glob) names, sorted by name.

    Below a folder, files of the given suffixes count (all, if none is given), hidden files and
    folders do not. A store is asked for a listing, never for each file (but for HTTP, whose
    index pages tell no sizes). Names are paths below the folder, or the glob's fixed part.

    Args:
        unreadable: told of local folders that cannot be read; passed over if not given.

    Raises:
        FileNotFoundError: when there is no such file, folder or match, with the reason.
        RequestError: when the store refuses, or does not answer.
    """
    if not is_url(path):
        yield from _local(local_path(path), suffixes, unreadable)
        return
    try:
        yield from sorted(_remote(path, suffixes))
    except PermissionError as error:
        raise RequestError(f"{path}: {error.strerror}") from error


def file_at(path: str) -> File:
    """The file at a local path or URL.

    Raises:
        OSError: when it is not there, or may not be read.
        RequestError: when its store does not answer.
    """
    if not is_url(path):
        return _local_file(local_path(path), missing_ok=False)
    fs, inside = store_of(path)
    fs.invalidate_cache()
    return _file(path, RETRIES.call(path, lambda: fs.info(inside)))


def version_of(info: dict[str, Any]) -> str:
    """The version that an entry of fsspec tells."""
    found = next((info[key] for key in _VERSIONS if info.get(key)), "")
    return str(found.timestamp() if isinstance(found, datetime) else found)


def _local(
    start: Path, suffixes: tuple[str, ...], unreadable: Unreadable | None
) -> Iterator[tuple[str, File]]:
    if start.is_file():
        yield _name(start, start.parent), _local_file(start)
        return
    if start.is_dir():
        nothing = f"no {' or '.join(suffixes) or 'readable'} file in this folder"
        paths: Iterable[Path] = (p for p in walk(start, unreadable) if _ends(p.name, suffixes))
    elif glob.has_magic(str(start)):
        nothing = "no file matches"
        found = glob.glob(str(start), recursive=True)  # noqa: PTH207 - it may be absolute
        paths = (p for p in map(Path, found) if p.is_file())
        start = next(p for p in start.parents if not glob.has_magic(str(p)))
    else:
        kind = "is no regular file" if start.exists() else "no such file or folder"
        raise FileNotFoundError(kind)
    names = sorted((_name(path, start), path) for path in paths)
    if not names:
        raise FileNotFoundError(nothing)
    for name, path in names:
        yield name, _local_file(path)


def _local_file(path: Path, missing_ok: bool = True) -> File:
    try:
        stat = path.stat()
    except OSError:  # a link to nowhere, say: reading it will tell
        if missing_ok:
            return File(str(path), 0, "")
        raise
    return File(str(path), stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ctime_ns}")


def walk(folder: Path, unreadable: Unreadable | None = None) -> Iterator[Path]:
    """Every file below a local folder, hidden ones and those in hidden folders passed over."""

    def refuse(error: OSError) -> None:
        if unreadable:
            unreadable(str(error.filename), error)

    seen: set[tuple[int, int]] = set()  # links may lead round in circles
    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here = Path(root).stat()
        if (here.st_dev, here.st_ino) in seen:
            folders.clear()
            continue
        seen.add((here.st_dev, here.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(root, name)


def _name(path: Path, root: Path) -> str:
    """`path` below `root`, with slashes, as text even where a name is not UTF-8."""
    return os.fsencode(path.relative_to(root).as_posix()).decode("utf-8", "backslashreplace")


def _ends(name: str, suffixes: tuple[str, ...]) -> bool:
    return not suffixes or name.lower().endswith(suffixes)


def _remote(url: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, File]]:
    fs, path = store_of(url)
    fs.invalidate_cache()  # a listing of earlier is not what is there
    web = protocol_of(url).startswith("http")
    wild = r"[*\[]" if web else r"[*?\[]"
    if re.search(wild, path):
        matches = re.compile(glob_translate(path)).match
        folder = re.split(wild, url, maxsplit=1)[0].rpartition("/")[0]
        found = _below(fs, folder, lambda name, full: _shown(name) and bool(matches(full)))
        nothing = "no file matches"
    else:
        info = RETRIES.call(url, lambda: fs.info(path))
        # of an index page HTTP says that it is a file
        page = web and (path.endswith("/") or "html" in str(info.get("mimetype")))
        if info["type"] == "file" and not (page and not _ends(path, suffixes or ("/",))):
            file = _file(url, info)
            yield file.name, file
            return
        found = _below(fs, url, lambda name, _: _shown(name) and _ends(name, suffixes))
        nothing = f"no {' or '.join(suffixes) or 'readable'} file in this folder"
    if (first := next(found, None)) is None:
        raise FileNotFoundError(nothing)
    yield first
    yield from found


def _below(fs: Any, folder: str, wanted: Callable[[str, str], bool]) -> Iterator[tuple[str, File]]:
    """The files under a URL of which `wanted(name, path on the store)`."""
    root = fs._strip_protocol(folder) + "/" * protocol_of(folder).startswith("http")
    listing = RETRIES.call(folder, lambda: fs.find(root, detail=True))
    fs.invalidate_cache()  # it may be of millions
    for full, info in listing.items():
        name = full.removeprefix(root.rstrip("/")).lstrip("/")
        if name and not full.endswith("/") and wanted(name, full):
            yield name, _file(f"{folder.rstrip('/')}/{name}", info)


def _shown(name: str) -> bool:
    return not any(part.startswith(".") for part in name.split("/"))


def _file(url: str, info: dict[str, Any]) -> File:
    if info["type"] != "file":
        raise FileNotFoundError(f"{url}: is a folder")
    if info.get("size") is None:  # an index page over HTTP tells none
        fs, path = store_of(url)
        info = RETRIES.call(url, lambda: fs.info(path))
        if info.get("size") is None:
            raise RequestError(
                f"{url}: the server does not tell its size. Fetch it, and name the copy."
            )
    return File(url, int(info["size"]), version_of(info))
