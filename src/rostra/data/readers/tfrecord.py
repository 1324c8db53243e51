"""TFRecord: records framed by their length and checksums, each a tf.train.Example.

The frame is: length (uint64, little endian), masked CRC-32C of these eight bytes, data, masked
CRC-32C of the data (TensorFlow's core/lib/io/record_writer.h); an Example is a protobuf message
(core/example/example.proto): Features.feature (map) of BytesList, FloatList or Int64List.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from rostra.config.sources import TfrecordSource
from rostra.data.readers.compressed import open_plain
from rostra.data.sources import (
    BadRecords,
    Document,
    Part,
    Reader,
    find_parts,
    reading,
    refuse_empty,
)
from rostra.errors import RequestError

SUFFIXES = tuple(
    f"{name}{packed}"
    for name in (".tfrecord", ".tfrecords", ".tfrec")
    for packed in ("", ".gz", ".zst")
)
Checksum = Callable[[bytes], int]


class BrokenRecord(OSError):
    """A frame, or the message in it, that is not what it should be."""


@dataclass(frozen=True)
class TfrecordReader(Reader):
    """The text is the feature `field`; the id is file and number, the metadata the others."""

    source: TfrecordSource
    kind: ClassVar[str] = "tfrecord"

    def parts(self, bad: BadRecords) -> list[Part]:
        return find_parts(self.source.path, SUFFIXES, self.key, bad)

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        number = 0
        with reading(part, bad), open_plain(part.file) as stream:
            for number, data in enumerate(frames(stream, checksum(self.key)), 1):
                where = f"{part.where}, record {number}"
                try:
                    values = example(data)
                except (BrokenRecord, UnicodeDecodeError, struct.error) as error:
                    bad.reject("no Example", where, f"is no tf.train.Example ({error})", "Mend it")
                    continue
                found = self.document(values, f"{part.name}:{number}", where, bad)
                if found is not None:
                    yield found
            if not number:
                refuse_empty(part.where, bad)


def checksum(key: str) -> Checksum:
    """The masked CRC-32C. Raises RequestError when its package is not installed."""
    try:
        from crc32c import crc32c
    except ImportError as error:
        raise RequestError(
            f"{key}: TFRecord files are checked by crc32c, which is not installed. Run: pip "
            "install 'rostra[tfrecord]'"
        ) from error

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    return masked


def frames(stream: BinaryIO, checked: Checksum) -> Iterator[bytes]:
    """The data of each record.

    Raises:
        BrokenRecord: when a checksum does not fit, or the file ends within a record.
    """
    number = 0
    while head := stream.read(12):
        number += 1
        if len(head) < 12:
            raise BrokenRecord(f"truncated: it ends within record {number}")
        length, crc = struct.unpack("<QI", head)
        if checked(head[:8]) != crc:
            raise BrokenRecord(f"record {number}: the checksum of its length does not fit")
        body = stream.read(length + 4)
        if len(body) < length + 4:
            raise BrokenRecord(f"truncated: it ends within record {number}")
        data = body[:-4]
        if checked(data) != int.from_bytes(body[-4:], "little"):
            raise BrokenRecord(f"record {number}: the checksum of its data does not fit")
        yield data


def example(data: bytes) -> dict[str, Any]:
    """The features of a tf.train.Example; lists of one are values, bytes of UTF-8 are text.

    Raises:
        BrokenRecord: when it is none.
    """
    values: dict[str, Any] = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            name = b"".join(_messages(entry, 1)).decode()
            found = [v for feature in _messages(entry, 2) for v in _values(feature)]
            values[name] = found[0] if len(found) == 1 else found
    return values


def _values(feature: bytes) -> Iterator[Any]:
    for kind, listed in _fields(feature):
        for field, value in _fields(listed) if isinstance(listed, bytes) else ():
            if field != 1:
                continue
            if kind == 1 and isinstance(value, bytes):
                yield _text(value)
            elif kind == 2:
                raw = value if isinstance(value, bytes) else struct.pack("<I", value)
                yield from struct.unpack(f"<{len(raw) // 4}f", raw[: len(raw) // 4 * 4])
            elif kind == 3:
                whole = list(_varints(value)) if isinstance(value, bytes) else [value]
                yield from (n - (1 << 64) if n >> 63 else n for n in whole)


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None  # a picture, say


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    """The fields of a message with this number that have a length."""
    return (v for field, v in _fields(data) if field == number and isinstance(v, bytes))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, place = _varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise BrokenRecord(f"a field of wire type {kind}")
        raw = data[place : place + size]
        if len(raw) < size:
            raise BrokenRecord("a field reaches beyond the end")
        place += size
        yield tag >> 3, raw if kind == 2 else int.from_bytes(raw, "little")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where the next field begins."""
    value = shift = 0
    while place < len(data) and shift < 70:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
    raise BrokenRecord("a number that does not end")


def _varints(data: bytes) -> Iterator[int]:
    place = 0
    while place < len(data):
        value, place = _varint(data, place)
        yield value
