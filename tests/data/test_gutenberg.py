from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from rostra.config.sources import GutenbergSource
from rostra.data.gutenberg import GutenbergReader, strip_licence
from rostra.data.sources import BadRecords
from rostra.errors import RequestError

HEADER = """The Project Gutenberg EBook of A Book, by Some One

This eBook is for the use of anyone anywhere at no cost.

Title: A Book
Author: Some One
Release Date: May 1, 2001 [EBook #{number}]
Language: English
Character set encoding: {encoding}

*** START OF THIS PROJECT GUTENBERG EBOOK A BOOK ***
"""
FOOTER = """

End of the Project Gutenberg EBook of A Book, by Some One

*** END OF THIS PROJECT GUTENBERG EBOOK A BOOK ***

***** This file should be named 76.txt *****
*** START: FULL LICENSE ***
"""


def book(body: str, number: int = 76, encoding: str = "ISO-8859-1") -> str:
    text = HEADER.format(number=number, encoding=encoding) + f"\n\n{body}\n" + FOOTER
    return text.replace("\n", "\r\n")


def read(path: Path, bad: BadRecords | None = None) -> dict[str, str]:
    bad = bad or BadRecords("fail", lambda _: None)
    reader = GutenbergReader(0, GutenbergSource(type="gutenberg", path=str(path)))
    rows = [
        row
        for part in reader.parts(bad)
        for batch in reader.read(part, bad)
        for row in batch.to_pylist()
    ]
    return {row["id"]: row["text"] for row in rows}


def test_the_real_books(shared_data: Path) -> None:
    books = read(shared_data / "gutenberg")
    assert list(books) == ["76", "972", "1342", "12200", "16215"]
    for text in books.values():
        assert "Project Gutenberg" not in text
        assert "\r" not in text
        assert "\ufeff" not in text
        assert text == text.strip("\n \t") + "\n"
    assert books["76"].endswith("THE END. YOURS TRULY, _HUCK FINN_.\n")
    assert "ADVENTURES\n\nOF\n\nHUCKLEBERRY FINN" in books["76"]
    assert "L'Abbé Delaumosne" in books["12200"]


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ("UTF-8", "utf-8"),
        ("UTF-8", "utf-8-sig"),
        ("ISO-8859-1", "utf-8"),  # converted, but the header was forgotten
        ("ISO-8859-1", "iso-8859-1"),
        ("ISO-8859-1", "cp1252"),
        ("Windows-1252", "cp1252"),
        ("Unicode UTF-16", "utf-16"),
        ("ISO-8859-2", "iso-8859-2"),
        ("Big5", "big5"),
        ("ISO-2022-JP", "iso-2022-jp"),
    ],
)
def test_encodings(tmp_path: Path, declared: str, encoding: str) -> None:
    by_encoding = {
        "cp1252": "“café” – naïve",
        "iso-8859-2": "łódź",
        "big5": "紅樓夢",
        "iso-2022-jp": "源氏",
    }
    body = by_encoding.get(encoding, "café naïve")
    (tmp_path / "76.txt").write_bytes(book(body, encoding=declared).encode(encoding))
    assert read(tmp_path) == {"76": body + "\n"}


def test_what_is_said_to_be_utf8_and_is_not(tmp_path: Path) -> None:
    path = tmp_path / "76-0.txt"
    raw = book("café", encoding="UTF-8").encode("latin-1")
    path.write_bytes(raw)
    with pytest.raises(RequestError, match=rf"76-0.txt: not utf-8: byte {raw.index(0xE9)}"):
        read(tmp_path)


def test_a_book_is_taken_once_in_its_best_form(tmp_path: Path) -> None:
    """76.txt, 76-8.txt, pg76.txt and 76-0.txt, plain and zipped, in nested folders."""
    forms = ["76.zip", "76.txt", "76-8.zip", "76-8.txt", "pg76.txt", "76-0.zip", "76-0.txt"]
    for depth, name in enumerate(forms):
        folder = tmp_path.joinpath(*["7", "6", "76"][: depth % 4])
        folder.mkdir(parents=True, exist_ok=True)
        raw = book(f"from {name}").encode()
        if name.endswith(".zip"):
            with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(name.replace(".zip", ".txt"), raw)
                archive.writestr("readme.html", "no")
        else:
            (folder / name).write_bytes(raw)
        assert read(tmp_path) == {"76": f"from {name}\n"}
    (tmp_path / "76-h.zip").write_bytes(b"pages, not text")
    (tmp_path / "7" / "old").mkdir()
    (tmp_path / "7" / "old" / "76-0.txt").write_bytes(book("old").encode())
    assert read(tmp_path) == {"76": "from 76-0.txt\n"}


def test_old_names_get_their_number_from_the_header(tmp_path: Path) -> None:
    (tmp_path / "hfinn12.txt").write_bytes(book("huck").encode())
    (tmp_path / "8odd10.txt").write_text("no header at all\n")
    (tmp_path / "1342-0.txt").write_bytes(book("pride", number=1342).encode())
    assert read(tmp_path) == {"76": "huck\n", "1342": "pride\n", "8odd10.txt": "no header at all\n"}
    assert read(tmp_path / "hfinn12.txt") == {"76": "huck\n"}


@pytest.mark.parametrize(
    "text",
    [
        "Title: T\n***START OF THE PROJECT GUTENBERG EBOOK T***\nbody\n"
        "***END OF THE PROJECT GUTENBERG EBOOK T***\nx",
        "*** START OF THE PROJECT GUTENBERG EBOOK A VERY\nLONG TITLE ***\nbody\n\n"
        "End of Project Gutenberg's T\nx",
        "***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nlaw\n"
        "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\nbody\n"
        "End of The Project Gutenberg Etext of T\n",
        "*END THE SMALL PRINT! FOR PUBLIC DOMAIN EBOOKS*Ver.10/04/01*END*\nbody",
        "*** START OF THIS PROJECT GUTENBERG EBOOK T ***\n"
        "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*END*\nbody\n"
        "*** END OF THIS PROJECT GUTENBERG EBOOK T ***\n",
        "body\n***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nlaw\n"
        "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n",
        "body",
    ],
)
def test_licence_variants(text: str) -> None:
    assert strip_licence(text)[1] == "body\n"


def test_metadata_is_from_the_header(tmp_path: Path) -> None:
    (tmp_path / "76.txt").write_bytes(book("Title: not this").encode())
    reader = GutenbergReader(0, GutenbergSource(type="gutenberg", path=str(tmp_path)))
    bad = BadRecords("fail", lambda _: None)
    (batch,) = reader.read(reader.parts(bad)[0], bad)
    assert json.loads(batch["metadata"][0].as_py()) == {
        "file": "76.txt", "title": "A Book", "author": "Some One", "language": "English",
    }  # fmt: skip


def test_broken_zips_and_empty_books_are_named(tmp_path: Path) -> None:
    (tmp_path / "1.zip").write_bytes(b"PK no zip")
    with zipfile.ZipFile(tmp_path / "2.zip", "w") as archive:
        archive.writestr("2.html", "no text")
    (tmp_path / "3.txt").write_bytes(book(" ").encode())
    (tmp_path / "4.txt").write_bytes(b"\0\0")
    (tmp_path / "5.txt").write_bytes(b"")
    (tmp_path / "6.txt").write_bytes(book("good").encode())
    heard: list[str] = []
    bad = BadRecords("skip", heard.append)
    assert read(tmp_path, bad) == {"6": "good\n"}
    assert bad.counts == {"broken zip": 1, "no text": 1, "empty": 2, "binary": 1}
    assert all(str(tmp_path) in line for line in heard)
    with pytest.raises(RequestError, match=r"1\.zip: broken zip"):
        read(tmp_path)
    with pytest.raises(RequestError, match="no such file or folder"):
        read(tmp_path / "nowhere")
