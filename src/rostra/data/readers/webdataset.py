"""WebDataset: tar files in which members with one key, the name up to its first dot, are a
sample. Read member by member from the stream; nothing is extracted."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Self

from rostra.config.sources import WebDatasetSource
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

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
LARGEST_TEXT = 1 << 28  # bytes of a member that is read; other members are passed over
LARGEST_FIELD = 1 << 14  # bytes of a member that becomes metadata
_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")


class StrictHeader(tarfile.TarInfo):
    """Only its end mark ends an archive: a broken header, or none, is a ReadError, where tarfile
    takes it for the end too."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except _HEADER_ERROR as error:
            if type(error).__name__ == "EOFHeaderError":
                raise
            problem = "it ends without its end mark" if _is_end(error) else str(error)
            raise _READ_ERROR(f"broken or truncated tar: {problem}") from error


# The argument of tarfile's own method has the module's name.
_HEADER_ERROR, _READ_ERROR = tarfile.HeaderError, tarfile.ReadError


def _is_end(error: Exception) -> bool:
    return type(error).__name__ in ("EmptyHeaderError", "TruncatedHeaderError")


@dataclass(frozen=True)
class WebDatasetReader(Reader):
    """The text is a sample's .txt, or `field` of its .json; the id is file and key.

    Metadata are the other keys of the .json and small members of text.
    """

    source: WebDatasetSource
    kind: ClassVar[str] = "webdataset"

    def parts(self, bad: BadRecords) -> list[Part]:
        return find_parts(self.source.path, SUFFIXES, self.key, bad)

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        filled = False
        with reading(part, bad), open_plain(part.file) as stream:
            for key, members in samples(stream):
                filled = True
                where = f"{part.where}, {key}"
                if (values := self._values(members, where, bad)) is not None:
                    found = self.document(values, f"{part.name}:{key}", where, bad)
                    if found is not None:
                        yield found
            if not filled:
                refuse_empty(part.where, bad)

    def _values(
        self, members: dict[str, bytes], where: str, bad: BadRecords
    ) -> dict[str, Any] | None:
        """A sample as one table of values; None when it was rejected."""
        values: dict[str, Any] = {}
        try:
            if "json" in members:
                values = json.loads(members["json"])
            if not isinstance(values, dict):
                bad.reject("wrong type", where, "its .json is no object", "Correct it")
                return None
            if b"\0" in members.get("txt", b""):
                bad.reject("binary", where, "its .txt is binary, or too large", "Take it out")
                return None
            if "txt" in members:
                values[self.source.field] = members["txt"].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            bad.reject("encoding", where, f"not UTF-8 ({error})", "Convert it")
            return None
        except (ValueError, RecursionError) as error:
            bad.reject("not JSON", where, f"its .json is not JSON ({error})", "Correct it")
            return None
        for extension, raw in members.items():
            if extension not in ("txt", "json") and len(raw) <= LARGEST_FIELD:
                text = raw.decode("utf-8", "replace")
                if "\ufffd" not in text and "\0" not in text:
                    values.setdefault(extension, text)
        return values


def samples(stream: BinaryIO) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Members that follow each other with one key, by what their names end with; of others than
    .txt and .json only the small ones.

    Raises:
        tarfile.ReadError: for a tar that is broken, or ends early.
    """
    held: dict[str, bytes] = {}
    last = ""
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=StrictHeader) as tar:
        for member in tar:
            vars(tar)["members"] = []  # else it keeps the headers of all
            name = _KEY.fullmatch(member.name)
            if not member.isfile() or name is None:
                continue
            key, extension = name[1], name[2].lower()
            if held and (key != last or extension in held):
                yield last, held
                held = {}
            last = key
            limit = LARGEST_TEXT if extension in ("txt", "json") else LARGEST_FIELD
            content = tar.extractfile(member) if member.size <= limit else None
            held[extension] = content.read() if content else b"\0"
    if held:
        yield last, held
