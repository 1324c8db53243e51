"""Project Gutenberg dumps: mixed encodings, licence text around each book, and the same book
several times."""

from __future__ import annotations

import codecs
import contextlib
import io
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rostra.config.sources import GutenbergSource
from rostra.data.sources import (
    BadRecords,
    Document,
    Part,
    Reader,
    decode,
    find_parts,
    read_whole,
)
from rostra.files import File, open_range

SUFFIXES = (".txt", ".zip", ".utf8", ".utf-8")
LARGEST_BOOK = 1 << 28  # bytes; a zip that unfolds to more is no book

# 76.txt, 76-0.txt, pg76.txt, pg76.txt.utf8, 76-8.zip; 76-h.zip and the like are no text.
_NAME = re.compile(
    r"(?P<pg>pg)?(?P<number>[0-9]+)(?:-(?P<code>[0-9]))?(?P<utf8>\.txt\.utf-?8|\.utf-?8)?",
    re.IGNORECASE,
)
_OTHER_FORM = re.compile(r"(?:pg)?[0-9]+-\w+", re.IGNORECASE)
_NUMBER = re.compile(r"\[?\s*E(?:book|text)\s*#\s*([0-9]+)", re.IGNORECASE)

_DECLARED = re.compile(rb"^Character set encoding:[ \t]*([^\r\n]+)", re.IGNORECASE | re.MULTILINE)
_OTHER_ENCODING = re.compile(
    r"big-?5|gb2312|gbk|gb18030|shift[-_]?jis|euc-(?:jp|kr)|iso-2022-(?:jp|kr)|koi8-[ru]"
    r"|iso-8859-(?:[2-9]|1[0-6])|(?:windows|cp)-?125[013-8]",
    re.IGNORECASE,
)

_START = re.compile(
    r"^[ \t]*\*{3}[ \t]*START OF (?:THE|THIS) PROJECT GUTENBERG E(?:BOOK|TEXT)"
    r"(?:(?:[^\n]*\n){0,3}?[^\n]*?\*{3})?[^\n]*$",  # long titles run over lines
    re.IGNORECASE | re.MULTILINE,
)
_SMALL_PRINT_END = re.compile(
    r"^[ \t]*\*+END[ *]*(?:OF )?THE SMALL PRINT![^\n]*$", re.IGNORECASE | re.MULTILINE
)
_SMALL_PRINT = re.compile(r"^[ \t]*\*+START[ *]*THE SMALL PRINT!", re.IGNORECASE | re.MULTILINE)
_SMALL_PRINT_SEARCHED = 40_000  # characters of header in which the old small print may end
_END = re.compile(
    r"^[ \t]*\*{3}[ \t]*END OF (?:THE|THIS) PROJECT GUTENBERG E(?:BOOK|TEXT)",
    re.IGNORECASE | re.MULTILINE,
)
_END_OLD = re.compile(
    r"^[ \t]*\**[ \t]*End of (?:the |this )?Project Gutenberg", re.IGNORECASE | re.MULTILINE
)
_TAIL = 2_000  # characters before the end mark in which its older form may stand as well


@dataclass(frozen=True)
class GutenbergReader(Reader):
    """One document a book; its id is the book's number, its metadata what the header says."""

    source: GutenbergSource
    kind: ClassVar[str] = "gutenberg"

    def parts(self, bad: BadRecords) -> list[Part]:
        """One file a book, by number: UTF-8 before 8-bit before ASCII, plain before zip."""
        best: dict[str, tuple[tuple[bool, int, bool, str], File]] = {}
        for found in find_parts(self.source.path, SUFFIXES, self.key, bad):
            name, file = found.name, found.file
            if (form := _form(file)) is None:
                continue
            number, encoding = form
            id = number or name
            rank = ("old" in name.split("/")[:-1], encoding, file.suffix == ".zip", name)
            if id not in best or rank < best[id][0]:
                best[id] = (rank, file)
        if not best and not bad.counts["missing"]:
            nothing = f"no .txt or .zip of a book here ({self.key}.path)"
            bad.reject("missing", self.source.path, nothing, f"Correct {self.key}.path")
        by_number = sorted(best, key=lambda id: (not id.isdigit(), len(id) * id.isdigit(), id))
        return [Part(id, best[id][1]) for id in by_number]

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        raw = read_whole(part.file, bad)
        if raw is not None and part.file.suffix == ".zip":
            raw = _unzip(raw, part.where, bad)
        if raw is None:
            return
        text = _decode(raw, part.where, bad)
        if text is None:
            return
        header, body = strip_licence(text.replace("\r\n", "\n").replace("\r", "\n"))
        if body:
            yield Document(part.name, body, {"file": part.file.name, **_metadata(header)})
        else:
            problem = "nothing is left between licence header and footer"
            bad.reject("empty", part.where, problem, "Take the file away")


def strip_licence(text: str) -> tuple[str, str]:
    """Header and body of a book whose lines end with \\n; without marks, all is body."""
    start = 0
    if mark := _START.search(text):
        start = mark.end()
    ends = [mark.start() for mark in _END.finditer(text, start)]
    end = ends[-1] if ends else len(text)
    if mark := _SMALL_PRINT_END.search(text, start, min(end, start + _SMALL_PRINT_SEARCHED)):
        if text[mark.end() : end].strip():
            start = mark.end()
        elif first := _SMALL_PRINT.search(text, start, mark.start()):
            end = first.start()  # the small print follows the book
    # The older mark ends the oldest books, and repeats just before the newer mark in others.
    old_ends = list(_END_OLD.finditer(text, max(start, end - _TAIL) if ends else start, end))
    if old_ends:
        end = old_ends[0 if ends else -1].start()
    return text[:start], text[start:end].strip("\n \t") + "\n" if text[start:end].strip() else ""


def _form(file: File) -> tuple[str | None, int] | None:
    """Number of a book, and rank of the file's encoding (lower is better).

    None when the file is no text of a book, and for the number when nothing tells it.
    """
    if file.suffix not in SUFFIXES:
        return None
    utf8 = file.suffix in (".utf8", ".utf-8")
    stem = file.name if utf8 else file.name[: -len(file.suffix)]
    if name := _NAME.fullmatch(stem):
        if name["code"] == "0":
            return name["number"], 0
        if name["utf8"] or name["pg"]:
            return name["number"], 1
        return name["number"], 2 if name["code"] else 3
    if utf8 or _OTHER_FORM.fullmatch(stem):
        return None
    # The oldest books have names such as hfinn12.txt; the number is in the header, if at all.
    number = _NUMBER.search(_head(file))
    return (number[1] if number else None), 4


def _head(file: File) -> str:
    """The first lines of a file, for looking at only."""
    unheard = BadRecords("skip", lambda _: None)
    try:
        with open_range(file) as source:
            if file.suffix == ".zip":
                raw = _unzip(source.read(), file.url, unheard) or b""
            else:
                raw = source.read(8192)
    except OSError:
        return ""
    return raw[:8192].decode("latin-1")


def _unzip(raw: bytes, where: str, bad: BadRecords) -> bytes | None:
    """The text of a zipped book, unfolded in memory; None when it was rejected."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            texts = [i for i in archive.infolist() if i.filename.lower().endswith(".txt")]
            if not texts:
                problem = "there is no .txt in this zip"
                bad.reject("no text", where, problem, "Take the file away")
                return None
            member = max(texts, key=lambda info: (info.file_size, info.filename))
            if member.file_size > LARGEST_BOOK:
                problem = f"unfolds to {member.file_size:,} bytes, more than any book"
                bad.reject("too large", where, problem, "Take the file away")
                return None
            return archive.read(member)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error) as error:
        bad.reject("broken zip", where, f"broken zip ({error})", "Fetch it again")
        return None
    except (EOFError, OSError, RuntimeError, ValueError) as error:
        # RuntimeError: encrypted, or a compression this Python does not know; ValueError: a name
        bad.reject("broken zip", where, f"broken zip ({error})", "Fetch it again")
        return None


def _decode(raw: bytes, where: str, bad: BadRecords) -> str | None:
    """The text of a book; None when it was rejected."""
    return decode(raw, _encoding(raw), where, "its `Character set encoding` line", bad)


def _encoding(raw: bytes) -> str:
    """A book's encoding, by what its bytes and its header say.

    Bytes that are UTF-8 are UTF-8, whatever the header says. What is not, and is not declared
    as something of its own, is Windows-1252, which PG's "ISO-8859-1" often is, or ISO-8859-1.
    """
    declared = _DECLARED.search(raw, 0, 20_000)
    said = declared[1].decode("latin-1").lower() if declared else ""
    is_utf8 = _decodes(raw, "utf-8")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if (other := _OTHER_ENCODING.search(said)) and (not is_utf8 or b"\x1b" in raw):
        return _codec(other[0]) or "utf-8"  # which then rejects it
    if is_utf8 or "utf-8" in said or raw.startswith(b"\xef\xbb\xbf"):
        return "utf-8"  # or rejected as broken, if it only says so
    return "cp1252" if _decodes(raw, "cp1252") else "iso-8859-1"


def _codec(said: str) -> str | None:
    """Python's name of an encoding as headers write it; None when it knows none."""
    name = said.replace("windows-", "cp").replace("cp-", "cp").replace("big-5", "big5")
    with contextlib.suppress(LookupError):
        return codecs.lookup("gb18030" if name == "gb2312" else name).name
    return None


def _decodes(raw: bytes, encoding: str) -> bool:
    try:
        raw.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _metadata(header: str) -> dict[str, str]:
    found = re.findall(r"^(Title|Author|Language):[ \t]*(\S[^\n]*)", header, re.MULTILINE)
    return {key.lower(): value.strip() for key, value in reversed(found)}
