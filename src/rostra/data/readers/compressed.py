"""Files that may be compressed, as streams."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

import pyarrow as pa

from rostra.files import File, open_range

_CODECS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd"}


def plain_suffix(file: File) -> str:
    """What the name ends with, but for the compression: .jsonl of a.jsonl.gz."""
    name = file.name.lower()
    for ending in _CODECS:
        name = name.removesuffix(ending)
    return "." + name.rpartition(".")[2] if "." in name else ""


def is_compressed(file: File) -> bool:
    return file.suffix in _CODECS


def open_plain(file: File) -> BinaryIO:
    """The content of a file, unfolded as it is read when its name ends with .gz, .tgz or .zst.

    Raises (here, or while reading):
        OSError: as `open_range`; when what is compressed is broken, or ends early.
    """
    source = open_range(file)
    if (codec := _CODECS.get(file.suffix)) is None:
        return source
    return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(source, codec), 1 << 20))
