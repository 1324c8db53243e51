"""The parts that files of tokens are read in, and the rows of a part."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rostra.config.sources import TokensSource
from rostra.data.formats.mds import INDEX, MdsShard, mds_shards, read_mds
from rostra.data.formats.megatron import Index, Range, read_megatron
from rostra.data.formats.rows import Broken, Row
from rostra.data.formats.tables import parquet_groups, read_arrow, read_parquet
from rostra.data.formats.webdataset import read_tar
from rostra.data.sources import Part
from rostra.files import File, file_at, hash_file, open_range, read_bytes

SUFFIXES = {
    "arrow": (".arrow",),
    "parquet": (".parquet",),
    "webdataset": (".tar",),
    "megatron": (".idx",),
    "mds": (INDEX,),
}
PART_BYTES = 1 << 25  # of a part, about, where a file can be split


@dataclass(frozen=True)
class TokensPart(Part):
    """A part of a source of tokens, and what is known of it beside its file.

    `start` and `stop` are row groups of a Parquet file, and documents of a Megatron's.

    Attributes:
        label: what the ids of documents that have none begin with; their number follows.
        first: documents before it in its file.
        sha256: of the file, where a manifest tells it and the part is all of it.
        index: Megatron's `.idx`.
        shard: what the index of an MDS tells.
    """

    label: str = ""
    first: int = 0
    sha256: str | None = None
    index: File | None = None
    shard: MdsShard | None = None


def split(part: TokensPart, format: str, sums: Mapping[str, str]) -> list[TokensPart]:
    """The parts of a file (of MDS and Megatron, of what an index names).

    Args:
        sums: SHA-256 of files by name, where a manifest tells them.

    Raises:
        Broken, OSError: when it cannot be read so far.
    """
    match format:
        case "parquet":
            return _row_groups(part)
        case "megatron":
            return _documents(part, sums)
        case "mds":
            return _shards(part)
    return [part]


def _row_groups(part: TokensPart) -> list[TokensPart]:
    if part.file.size <= PART_BYTES:
        return [part]
    with open_range(part.file) as file:
        groups = parquet_groups(file)
    parts, start, first, rows, size = list[TokensPart](), 0, 0, 0, 0
    for number, (documents, stored) in enumerate(groups, 1):
        rows, size = rows + documents, size + stored
        if size >= PART_BYTES or number == len(groups):
            parts.append(_ranged(part, start, number, size, first))
            start, first, rows, size = number, first + rows, 0, 0
    return parts


def _documents(part: TokensPart, sums: Mapping[str, str]) -> list[TokensPart]:
    """Of the documents of an `.idx`, about equal numbers; the file of a part is the `.bin`."""
    digest = hash_file(part.file)
    _check(digest, part.sha256)
    index = Index.of(_range(part.file), part.file.size)
    url = part.file.url.removesuffix(".idx") + ".bin"
    try:
        data = file_at(url)
    except FileNotFoundError as error:
        raise Broken(f"has no {url} beside it") from error
    if data.size != (needed := index.size(_range(part.file))):
        raise Broken(f"tells of {needed:,} bytes, and {url} has {data.size:,}")
    label = part.label.removesuffix(".idx")
    whole = replace(
        part,
        name=f"{part.name}@{digest[:16]}",  # that of the .bin's content is the file's own
        label=label,
        file=data,
        stop=index.documents,
        index=part.file,
        sha256=sums.get(f"{label}.bin"),
    )
    count = min(index.documents, -(-data.size // PART_BYTES))
    if count <= 1:
        return [whole]
    bounds = [index.documents * k // count for k in range(count + 1)]
    return [
        _ranged(whole, start, stop, data.size // count, start)
        for start, stop in itertools.pairwise(bounds)
    ]


def _shards(part: TokensPart) -> list[TokensPart]:
    """The shards that an `index.json` names."""
    parts = []
    folder, below = (text.rpartition("/")[0] for text in (part.file.url, part.name))
    for shard in mds_shards(read_bytes(part.file.url)):
        stored = shard.stored.name
        name = f"{below}/{stored}" if below else stored
        try:
            file = file_at(f"{folder}/{stored}" if folder else stored)
        except FileNotFoundError as error:
            raise Broken(f"names {stored}, which is not there") from error
        parts.append(TokensPart(name, file, label=name, shard=shard))
    return parts


def _ranged(part: TokensPart, start: int, stop: int, size: int, first: int) -> TokensPart:
    name = f"{part.name}:{start}-{stop}"
    return replace(part, name=name, start=start, stop=stop, work=size, first=first, sha256=None)


def read_rows(part: TokensPart, source: TokensSource) -> Iterator[Row]:
    """The documents of a part.

    Raises:
        Broken: for what is not as its format has it.
        OSError, RequestError: as `open_range`.
    """
    if part.index is not None:
        idx = _range(part.index)
        bin = _range(part.file) if part.sha256 is None else _within(_whole(part))
        index = Index.of(idx, part.index.size)
        yield from read_megatron(index, idx, bin, part.start, part.stop or 0)
    elif part.shard is not None:
        yield from read_mds(_whole(part), part.shard, source.field, source.dtype)
    elif source.format == "arrow":
        yield from read_arrow(_whole(part), source.field)
    elif source.format == "parquet" and part.stop is None:
        yield from read_parquet(io.BytesIO(_whole(part)), 0, None, source.field)
    else:
        with open_range(part.file) as file:
            if source.format == "parquet":
                yield from read_parquet(file, part.start, part.stop, source.field)
            else:
                yield from read_tar(file, source.field, source.dtype, part.sha256)


def _whole(part: TokensPart) -> bytes:
    """The content of a part's file. Raises Broken when it is not what the manifest says."""
    with open_range(part.file) as file:
        content = file.read()
    if part.sha256 is not None:
        _check(hashlib.sha256(content).hexdigest(), part.sha256)
    return content


def _check(found: str, told: str | None) -> None:
    if told is not None and found != told:
        raise Broken("is another than its manifest says (its SHA-256 is another)")


def _range(file: File) -> Range:
    """Reads the bytes of a file from one place to another."""

    def read(start: int, stop: int) -> bytes:
        with open_range(file, start, stop) as opened:
            return opened.read()

    return read


def _within(content: bytes) -> Range:
    return lambda start, stop: content[start:stop]
