"""WebDataset: tar files in which members with one key, the name up to its first dot, are a
sample.

A document is written as `KEY.tokens.npy` (token ids, uint16 or uint32), of examples
`KEY.weights.npy` (float32), and `KEY.json` (`id`, and `bytes` of the text), with nine digits
as key. The same documents give the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rostra.data.formats.rows import (
    Broken,
    Documents,
    Row,
    as_tokens,
    as_weights,
    from_bytes,
)
from rostra.data.readers.webdataset import StrictHeader


def write_tar(documents: Documents, path: Path) -> None:
    """Write one tar file."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, id in enumerate(documents.ids):
            tokens, weights = documents.row(number)
            about = {"id": id, "bytes": documents.bytes[number]}
            _add(tar, f"{number:09d}.tokens.npy", _npy(tokens))
            if weights is not None:
                _add(tar, f"{number:09d}.weights.npy", _npy(weights))
            _add(tar, f"{number:09d}.json", json.dumps(about).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its times and owners are 0: nothing of this machine
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _npy(values: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, values, allow_pickle=False)
    return out.getvalue()


def read_tar(
    file: BinaryIO, field: str, dtype: str | None = None, sha256: str | None = None
) -> Iterator[Row]:
    """The samples of a tar file, read member by member.

    Args:
        field: the member with the token ids, the name after the key: `tokens.npy`, or `tokens`
            for that; `.npy`, `.json` (a list) or, with `dtype`, plain bytes.
        sha256: of the file, where it is known.

    Raises:
        Broken: when the file is cut or another than it was, or a sample has no token ids.
    """
    hashed = _Hashed(file)
    try:
        with tarfile.open(fileobj=hashed, mode="r|", tarinfo=StrictHeader) as tar:
            for key, members in _samples(tar):
                yield _row(key, members, field, dtype)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise Broken(f"is no whole tar file ({error})") from error
    if sha256 is not None and hashed.sha256() != sha256:
        raise Broken("is another than its manifest says (its SHA-256 is another)")


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Members by what follows the key in their names; those of a sample lie together."""
    key, members = None, dict[str, bytes]()
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # else it remembers all
        if not member.isfile():
            continue
        folder, slash, base = member.name.rpartition("/")
        stem, _, name = base.partition(".")
        content = tar.extractfile(member)
        if not stem or content is None:  # a hidden file is no sample
            continue
        if members and key != f"{folder}{slash}{stem}":
            yield str(key), members
            members = {}
        key = f"{folder}{slash}{stem}"
        if name in members:
            raise Broken(f"has two members {key}.{name}")
        members[name] = content.read()
    if members:
        yield str(key), members


def _row(key: str, members: dict[str, bytes], field: str, dtype: str | None) -> Row:
    name = field if field in members else f"{field}.npy"
    if name not in members:
        raise Broken(f"sample {key} has no member {field!r} (it has {', '.join(sorted(members))})")
    try:
        tokens = as_tokens(_values(members[name], name, dtype))
        weights = members.get("weights.npy")
        kept = as_weights(None if weights is None else _load(weights), len(tokens))
        about = json.loads(members.get("json", b"{}"))
    except (Broken, ValueError, EOFError, SyntaxError) as error:
        raise Broken(f"sample {key} {error}") from error
    id = about.get("id") if isinstance(about, dict) else None
    return Row(key if id is None else str(id), tokens, kept)


def _values(content: bytes, name: str, dtype: str | None) -> NDArray[Any]:
    if name.endswith("npy"):
        return _load(content)
    if name.endswith("json"):
        values = json.loads(content)
        if not isinstance(values, list) or not all(type(v) is int for v in values):
            raise Broken(f"has no list of whole numbers in {name}")
        return np.array(values, np.int64)
    return from_bytes(content, dtype, name)


def _load(content: bytes) -> NDArray[Any]:
    values: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return values


class _Hashed(io.RawIOBase):
    """A stream that is hashed as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._hash.update(content)
        return content

    def sha256(self) -> str:
        """Of all, to its end."""
        while self.read(1 << 20):
            pass
        return self._hash.hexdigest()
