"""MosaicML Streaming's MDS, read: `index.json`, and shards of samples of encoded columns.

A shard has, all little-endian: the number of samples (uint32); where each begins, and where the
last one ends (uint32 each); a JSON object with the columns; the samples. A sample has the size
of each column whose encoding has no fixed one (uint32 each), then the columns, by name.

Source: mosaicml/streaming, streaming/base/format/mds (writer.py, encodings.py).
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import itertools
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rostra.data.formats.rows import INTEGERS, Broken, Row, as_tokens, from_bytes

INDEX = "index.json"
# The numbers that stand for types where a column's encoding does not name one.
TYPES = dict(zip((8, 9, 16, 17, 32, 33, 64, 65), INTEGERS, strict=True))
UNPACK: dict[str, Callable[[bytes, int], bytes]] = {
    "zstd": lambda raw, size: pa.decompress(raw, size, "zstd", asbytes=True),
    "br": lambda raw, size: pa.decompress(raw, size, "brotli", asbytes=True),
    "snappy": lambda raw, size: pa.decompress(raw, size, "snappy", asbytes=True),
    "gz": lambda raw, _: gzip.decompress(raw),
    "bz2": lambda raw, _: bz2.decompress(raw),
}


@dataclass(frozen=True)
class MdsFile:
    """A file as the index tells of it."""

    name: str
    size: int  # in bytes
    hashes: tuple[tuple[str, str], ...]  # algorithm and value

    @classmethod
    def of(cls, found: dict[str, Any]) -> MdsFile:
        hashes = found.get("hashes") or {}
        return cls(str(found["basename"]), int(found["bytes"]), tuple(sorted(hashes.items())))

    def check(self, content: bytes) -> None:
        """Raises Broken when the content is another."""
        if len(content) != self.size:
            raise Broken(f"has {len(content):,} bytes, and its index says {self.size:,}")
        for name, value in self.hashes:
            if _hash(name, content) != value:
                raise Broken(f"is another than its index says (its {name} is another)")


@dataclass(frozen=True)
class MdsShard:
    """What `index.json` says of a shard."""

    names: tuple[str, ...]  # of columns
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]  # of a column in bytes; None where it varies
    samples: int
    compression: str | None
    raw: MdsFile
    zip: MdsFile | None  # when it is compressed

    @property
    def stored(self) -> MdsFile:
        """The file that is there."""
        return self.zip or self.raw

    @classmethod
    def of(cls, found: dict[str, Any]) -> MdsShard:
        """Raises Broken when it says too little, or is of a kind that is not read."""
        try:
            version, kind, packed = (found[name] for name in ("version", "format", "compression"))
            shard = cls(
                names=tuple(found["column_names"]),
                encodings=tuple(found["column_encodings"]),
                sizes=tuple(found["column_sizes"]),
                samples=int(found["samples"]),
                compression=packed.split(":")[0] if packed else None,
                raw=MdsFile.of(found["raw_data"]),
                zip=MdsFile.of(found["zip_data"]) if packed else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Broken(f"says nothing usable of a shard ({error!r})") from error
        if version != 2 or kind != "mds":
            raise Broken(f"has a shard of format {kind}, version {version}; MDS is read, version 2")
        if shard.compression and shard.compression not in UNPACK:
            raise Broken(f"has a shard in compression {shard.compression}, which is not known")
        return shard


def mds_shards(index: bytes) -> list[MdsShard]:
    """The shards that an `index.json` names.

    Raises:
        Broken: when it is no index.
    """
    try:
        found = json.loads(index)["shards"]
    except (ValueError, KeyError, TypeError) as error:
        raise Broken(f"is no index of MDS ({error!r})") from error
    return [MdsShard.of(shard) for shard in found]


def read_mds(content: bytes, shard: MdsShard, field: str, dtype: str | None) -> Iterator[Row]:
    """The samples of a shard.

    Args:
        content: of the file as it is stored.
        field: the column of token ids: an ndarray, a JSON list or, with `dtype`, plain bytes.

    Raises:
        Broken: when a size or hash is not what the index says, or the column is none of ids.
    """
    column = _column(shard, field)
    raw = _unpacked(content, shard)
    id = shard.names.index("id") if "id" in shard.names else None
    for number, sample in enumerate(_samples(raw, shard)):
        try:
            columns = _columns(sample, shard)
            tokens = as_tokens(_decode(columns[column], shard.encodings[column], field, dtype))
            name = None if id is None else _id(columns[id], shard.encodings[id])
        except (Broken, ValueError, IndexError, struct.error, KeyError) as error:
            raise Broken(f"sample {number} {error}") from error
        yield Row(name, tokens)


def _column(shard: MdsShard, field: str) -> int:
    """Raises Broken when it is not there, or of an encoding that is never decoded."""
    if field not in shard.names:
        raise Broken(f"has no column {field!r} (it has {', '.join(shard.names)})")
    column = shard.names.index(field)
    encoding = shard.encodings[column]
    if encoding == "pkl":
        raise Broken(f"has {field!r} pickled (pkl), which could run any code: write it as ndarray")
    if encoding.split(":")[0] not in ("ndarray", "bytes", "json"):
        raise Broken(f"has {field!r} as {encoding}, and token ids are ndarray, bytes or json")
    return column


def _unpacked(content: bytes, shard: MdsShard) -> bytes:
    """The shard, checked against the index and decompressed."""
    shard.stored.check(content)
    if shard.compression is None:
        return content
    try:
        raw = UNPACK[shard.compression](content, shard.raw.size)
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise Broken(f"cannot be decompressed ({error})") from error
    shard.raw.check(raw)
    return raw


def _hash(name: str, content: bytes) -> str:
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return hashlib.new(name, content, usedforsecurity=False).hexdigest()
    try:
        return str(getattr(importlib.import_module("xxhash"), name)(content).hexdigest())
    except (ImportError, AttributeError) as error:
        raise Broken(f"is hashed with {name}; install the package xxhash to check it") from error


def _samples(raw: bytes, shard: MdsShard) -> Iterator[bytes]:
    count = int.from_bytes(raw[:4], "little")
    offsets = np.frombuffer(raw[4 : 4 + 4 * (shard.samples + 1)], "<u4").astype(np.int64)
    whole = count == shard.samples and len(offsets) == count + 1
    if not whole or offsets[-1] != len(raw) or (np.diff(offsets) < 0).any():
        raise Broken(f"has no {shard.samples} samples in order, as its index says")
    for start, stop in itertools.pairwise(offsets.tolist()):
        yield raw[start:stop]


def _columns(sample: bytes, shard: MdsShard) -> list[bytes]:
    varying = sum(size is None for size in shard.sizes)
    told = iter(struct.unpack_from(f"<{varying}I", sample))
    at, columns = 4 * varying, []
    for size in shard.sizes:
        length = next(told) if size is None else size
        columns.append(sample[at : at + length])
        at += length
    if at != len(sample):
        raise Broken(f"has {len(sample)} bytes, and its columns have {at}")
    return columns


def _decode(raw: bytes, encoding: str, name: str, dtype: str | None) -> NDArray[Any]:
    kind, *told = encoding.split(":")
    if kind == "bytes":
        return from_bytes(raw, dtype, name)
    if kind == "json":
        values = json.loads(raw)
        if not isinstance(values, list) or not all(type(v) is int for v in values):
            raise Broken(f"has no list of whole numbers under {name!r}")
        return np.array(values, np.int64)
    at = 0
    if told:
        type_name = told[0]
    else:
        type_name, at = TYPES.get(raw[0], f"type {raw[0]}"), 1
    if type_name not in INTEGERS:
        raise Broken(f"has {name!r} as {type_name}, and token ids are whole numbers")
    if len(told) == 2:
        shape = [int(n) for n in told[1].split(",")]
    else:
        axes, width = raw[at] >> 2, 1 << raw[at] % 4
        shape = np.frombuffer(raw, f"<u{width}", axes, at + 1).tolist()
        at += 1 + axes * width
    return np.frombuffer(raw[at:], np.dtype(type_name).newbyteorder("<")).reshape(shape)


def _id(raw: bytes, encoding: str) -> str | None:
    """A document's name, where the column `id` is one."""
    if encoding in ("str", "str_int"):
        return raw.decode()
    kind = "int64" if encoding == "int" else encoding
    return str(np.frombuffer(raw, kind)[0]) if kind in INTEGERS else None
