"""Prepared data, written in the formats of other systems.

A folder or URL gets the documents of both splits (`train-…`, `held_out-…`), the tokenizer, and
`manifest.json`, written last: the SHA-256 and size of each file, and under `exported` the
format, the tokenizer's hash and vocabulary, and counts.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from rostra.data.formats.megatron import MegatronWriter
from rostra.data.formats.rows import Documents
from rostra.data.formats.tables import write_parquet
from rostra.data.formats.webdataset import write_tar
from rostra.data.prepared import TOKENIZER, Prepared
from rostra.data.shards import SPLITS, Shards, Split
from rostra.errors import RequestError
from rostra.files import exists, is_url, join, put, put_bytes, read_bytes
from rostra.store import MANIFEST, commit_folder, explain_full_disk, sha256_file

Format = Literal["webdataset", "parquet", "megatron"]
VERSION = 1  # of what the manifest says

Done = Callable[[Path], None]  # told of each file that is complete
Counts = list[dict[str, Any]]  # of each file: file, documents, tokens


def write_as(prepared: Prepared, format: str, output: str) -> dict[str, Any]:
    """Write prepared data to a folder or URL, which appears whole: its manifest comes last. What
    is there already, of the same data in the same format, is left as it is.

    Returns:
        `path, format, files` (a count)`, bytes`.

    Raises:
        RequestError: for a format that is not known or has no place for weights, a place that
            holds something else or cannot be written, and a full disk.
    """
    if format not in get_args(Format):
        known = ", ".join(get_args(Format))
        raise RequestError(f"--as {format}: no such format; the formats are: {known}")
    if format == "megatron" and "audit" in prepared.manifest:
        raise RequestError(
            "--as megatron: these are examples, and Megatron's format has no place for their "
            "weights as targets; write them as parquet or webdataset"
        )
    about = _about(prepared, format)
    manifest = _found(output, about)
    if manifest is None:
        try:
            with _committed(output, about) as (folder, done):
                prepared.tokenizer.save_pretrained(folder / TOKENIZER)
                for path in sorted((folder / TOKENIZER).rglob("*")):
                    done(path)
                for split in SPLITS:
                    shards = prepared.train if split == "train" else prepared.held_out
                    about["shards"][split] = _WRITERS[format](shards, folder, split, done)
        except OSError as error:
            raise RequestError(f"--output {output}: cannot be written ({error})") from error
        manifest = json.loads(read_bytes(join(output, MANIFEST)))
    sizes = [file["bytes"] for file in manifest["files"].values()]
    return {"path": output, "format": format, "files": len(sizes), "bytes": sum(sizes)}


def _about(prepared: Prepared, format: str) -> dict[str, Any]:
    told = prepared.manifest
    return {
        "version": VERSION,
        "format": format,
        "key": prepared.key,
        "tokenizer": told["tokenizer"],
        "dtype": told["dtype"],
        "counts": told["counts"],
        "shards": {},
    }


def _found(output: str, about: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of the same data that is there; None when nothing is.

    Raises:
        RequestError: when something else is.
    """
    try:
        if exists(join(output, MANIFEST)):
            manifest: dict[str, Any] = json.loads(read_bytes(join(output, MANIFEST)))
            there = manifest.get("exported", {})
            if all(there.get(name) == about[name] for name in ("version", "format", "key")):
                return manifest
        elif is_url(output) or not _filled(Path(output).expanduser()):
            return None
    except (OSError, ValueError):
        pass
    raise RequestError(f"--output {output}: holds something else; name another folder, or empty it")


def _filled(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


@contextlib.contextmanager
def _committed(output: str, about: dict[str, Any]) -> Iterator[tuple[Path, Done]]:
    """A local folder to write into; a file that is told to be done may be gone at once."""
    if not is_url(output):
        with commit_folder(Path(output).expanduser(), exported=about) as aside:
            yield aside, lambda _: None
        return
    files: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="rostra-") as name, explain_full_disk(Path(name)):

        def send(path: Path) -> None:
            below = path.relative_to(name).as_posix()
            files[below] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
            put(path, join(output, below))
            path.unlink()

        yield Path(name), send
    whole = json.dumps({"exported": about, "files": files}, indent=2) + "\n"
    put_bytes(whole.encode(), join(output, MANIFEST))


def _documents(shards: Shards) -> Iterator[Documents]:
    return (Documents.of(shards[index]) for index in range(len(shards)))


def _counts(name: str, documents: int, tokens: int) -> dict[str, Any]:
    return {"file": name, "documents": documents, "tokens": tokens}


def _each(write: Callable[[Documents, Path], None], suffix: str) -> Callable[..., Counts]:
    """A writer of one file for each shard."""

    def files(shards: Shards, folder: Path, split: Split, done: Done) -> Counts:
        written = []
        for index, documents in enumerate(_documents(shards)):
            path = folder / f"{split}-{index:05d}{suffix}"
            write(documents, path)
            done(path)
            written.append(_counts(path.name, len(documents), len(documents.tokens)))
        return written

    return files


def _megatron(shards: Shards, folder: Path, split: Split, done: Done) -> Counts:
    """One pair of files for the split: what Megatron calls a prefix."""
    if not len(shards):
        return []
    writer = MegatronWriter(folder / split, shards[0].tokens.dtype.type)
    for documents in _documents(shards):
        writer.add(documents)
    writer.close()
    for suffix in ("bin", "idx"):
        done(folder / f"{split}.{suffix}")
    return [_counts(f"{split}.idx", shards.documents, shards.tokens)]


_WRITERS: dict[str, Callable[..., Counts]] = {
    "webdataset": _each(write_tar, ".tar"),
    "parquet": _each(write_parquet, ".parquet"),
    "megatron": _megatron,
}
