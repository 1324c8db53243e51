from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rostra.errors import RequestError
from rostra.files import (
    Retries,
    exists,
    fetch,
    file_at,
    find_files,
    hash_file,
    is_url,
    join,
    open_range,
    put,
    put_bytes,
    read_bytes,
    reading,
    remove,
)
from stores import BadNetwork, Quiet, Ranges, S3Server, endpoint, free_port, upload, web

CONTENT = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries that take no time."""
    monkeypatch.setattr(Retries, "delays", lambda _: iter([0.01] * 5))


@pytest.fixture(params=["local", "memory", "s3", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder with some files in it, on each kind of store."""
    folder = tmp_path / "files"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    for name in ("b.txt", "a.md", "deep/c.txt", "deep/.hidden/h.txt", ".secret.txt", "x.bin"):
        (folder / name).write_text(name * 3)
    match request.param:
        case "local":
            yield str(folder)
        case "memory":
            url = f"memory://{tmp_path.name}"
            upload(folder, url)
            yield url
            remove(url)
        case "s3":
            url = request.getfixturevalue("s3") + "/in"
            upload(folder, url)
            yield url
        case "http":
            with web(folder) as url:
                yield url


def test_a_file_a_folder_and_a_glob(place: str) -> None:
    whole = dict(find_files(place, (".txt", ".md")))
    assert list(whole) == ["a.md", "b.txt", "deep/c.txt"]
    for name, file in whole.items():
        assert file.size == 3 * len(name)
        assert file.version
        assert file.url == join(place, *name.split("/"))
        assert open_range(file).read() == name.encode() * 3
        assert file_at(file.url) == file
    assert [name for name, _ in find_files(join(place, "b.txt"), (".md",))] == ["b.txt"]
    assert [name for name, _ in find_files(join(place, "**", "*.txt"))] == ["b.txt", "deep/c.txt"]
    for path, said in (("*.png", "no file matches"), ("deep/none", "no")):
        with pytest.raises(FileNotFoundError, match=said):
            list(find_files(join(place, *path.split("/"))))
    with pytest.raises(FileNotFoundError, match=r"no \.png file in this folder"):
        list(find_files(place, (".png",)))


def test_files_go_to_a_store_and_come_back(place: str, tmp_path: Path) -> None:
    if place.startswith("http"):
        return
    (tmp_path / "big").write_bytes(CONTENT)
    url = join(place, "new", "big.bin")
    assert not exists(url)
    put(tmp_path / "big", url)
    assert exists(url)
    fetch(url, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == CONTENT
    with open_range(file_at(url), 1_000_000, 1_000_010) as source:
        assert source.read(4) + source.read() == CONTENT[1_000_000:1_000_010]
    with open_range(file_at(url)) as source:
        for start in (2_999_990, 5, 1_500_000):
            source.seek(start)
            assert source.read(10) == CONTENT[start : start + 10]
    put_bytes(b"small", url)
    assert read_bytes(url) == b"small"
    remove(join(place, "new"))
    assert not exists(url)
    remove(join(place, "new"))


def test_names_of_places() -> None:
    assert [is_url(p) for p in ("s3://b/k", "/a/b", "C:/x", "file:///a", "a/b")] == [
        True, False, False, False, False,
    ]  # fmt: skip
    assert join("s3://b", "x", "y") == "s3://b/x/y"
    assert join("/a/", "x") == "/a/x"


@pytest.mark.parametrize("kind", ["s3", "ranges", "plain"])
def test_broken_connections_go_on_where_they_broke(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resets at random bytes and answers of 503: the bytes are the same. (A reset may also take
    what came and was not read yet, so that all faults may fall on one byte.)"""
    monkeypatch.setattr(Retries, "delays", lambda _: iter([0.01] * 20))
    (tmp_path / "f").write_bytes(CONTENT)
    if kind == "s3":
        url = request.getfixturevalue("s3") + "/f"
        put(tmp_path / "f", url)
        server: S3Server = request.getfixturevalue("s3_server")
        with BadNetwork(server.port, 20, 600_000) as network, endpoint(network.address):
            _reads_right(url)
    else:
        with (
            web(tmp_path, Ranges if kind == "ranges" else Quiet) as url,
            # without ranges each attempt starts again: few of them break
            BadNetwork(
                int(url.rstrip("/").rpartition(":")[2]), 20 if kind == "ranges" else 5, 600_000
            ) as network,
        ):
            _reads_right(f"{network.address}/f")
    assert network.broken == network.faults


def _reads_right(url: str) -> None:
    with open_range(file_at(url)) as source:
        assert source.read() == CONTENT
    with open_range(file_at(url), 1_234_567) as source:
        assert source.read() == CONTENT[1_234_567:]
    assert len(hash_file(file_at(url))) == 64


@pytest.mark.parametrize("kind", ["s3", "http", "memory"])
def test_another_version_is_never_read(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if kind == "http":
        (tmp_path / "f").write_bytes(b"old")
        with web(tmp_path) as url:
            file = file_at(url + "f")
            time.sleep(1.1)  # HTTP tells times in seconds
            (tmp_path / "f").write_bytes(b"new")
            with pytest.raises(RequestError, match="f: changed after it was listed"):
                open_range(file).read()
        return
    url = "memory://versions/f" if kind == "memory" else request.getfixturevalue("s3") + "/f"
    put_bytes(b"old", url)
    file = file_at(url)
    put_bytes(b"new", url)
    for stop in (None, 2):
        with pytest.raises(RequestError, match="f: changed after it was listed"):
            open_range(file, 0, stop).read()


def test_another_version_that_comes_while_a_range_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://versions/range"
    put_bytes(b"old", url)
    file = file_at(url)
    store = fsspec.filesystem("memory")
    read = store.cat_file

    def cat_file(*where: Any, **span: Any) -> Any:
        put_bytes(b"new", url)
        return read(*where, **span)

    monkeypatch.setattr(store, "cat_file", cat_file)
    with pytest.raises(RequestError, match="changed after it was listed"):
        open_range(file, 0, 2).read()


def test_a_store_that_is_lost_is_no_truncated_file(
    hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would be skipped where bad files are."""
    url = "memory://lost/f"
    put_bytes(CONTENT, url)
    file = file_at(url)

    def lost(*_: object, **__: object) -> None:
        raise ConnectionResetError("the connection was reset")

    for name in ("cat_file", "info"):
        monkeypatch.setattr(fsspec.filesystem("memory"), name, lost)
    with pytest.raises(RequestError, match=r"f: does not answer \(the connection was reset"):
        open_range(file).read()


def test_a_server_without_ranges_sends_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large: asked for range by range, it would send all before each of them too."""
    monkeypatch.setattr(reading, "REQUEST_BYTES", 1_000_000)
    asked: list[str] = []
    monkeypatch.setattr(Quiet, "log_request", lambda self, *_: asked.append(self.command))
    (tmp_path / "f").write_bytes(CONTENT)
    with web(tmp_path) as url:
        file = file_at(url + "f")
        asked.clear()
        assert open_range(file, 5, 2_500_000).read() == CONTENT[5:2_500_000]
    assert asked == ["GET"]


class Beside(Ranges):
    """Sends the range that begins a byte further than the one it is asked for, and says so."""

    def end_headers(self) -> None:
        if asked := re.match(r"bytes=(\d+)", self.headers.get("Range", "")):
            self.send_header("Content-Range", f"bytes {int(asked[1]) + 1}-{len(CONTENT)}/*")
        super().end_headers()


def test_another_range_than_was_asked_for_is_not_used(hasty: None, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    with web(tmp_path, Beside) as url:
        file = file_at(url + "f")
        with pytest.raises(RequestError, match=r"f: does not answer .*sent bytes 6-3000000"):
            open_range(file, 5).read(10)


class Waiting(Quiet):
    """Sends the first half of a file, and the rest never."""

    there: list[str] = []  # noqa: RUF012 - of the one test

    def do_GET(self) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        modified = Path(self.translate_path(self.path)).stat().st_mtime
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", self.date_time_string(int(modified)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.there.append(self.path)
        self.rfile.read(1)  # until nobody listens any more


def test_many_files_of_a_web_server_are_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STREAM_BUFFER", 1000)
    (tmp_path / "f").write_bytes(CONTENT[:2000])
    with web(tmp_path, Waiting) as url, ThreadPoolExecutor(120) as readers:
        file = file_at(url + "f")
        files = [open_range(file) for _ in range(120)]
        found = [readers.submit(one.read, 10) for one in files]
        wait(found, 60)
        there = len(Waiting.there)
        for one in files:  # which lets go those that wait, if any do
            one.close()
        assert there == 120
        assert {one.result() for one in found} == {CONTENT[:10]}


class Strange(Ranges):
    """Answers with what the path asks for."""

    asked: list[str] = []  # noqa: RUF012 - of the one test

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        asked = re.match(r"bytes=(\d+)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        self.send_response(int(self.path[1:4]))
        self.send_header("Content-Length", str(100 - start))
        self.send_header("ETag", "one")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"x" * (40 - start))


def test_what_does_not_pass_is_told_at_once(hasty: None, tmp_path: Path) -> None:
    with web(tmp_path, Strange) as url:
        for status, kind, said in (
            (404, FileNotFoundError, "is not there"),
            (403, PermissionError, "access refused"),
        ):
            Strange.asked.clear()
            with pytest.raises(kind, match=said):
                file_at(f"{url}{status}")
            assert len(Strange.asked) <= 2  # HEAD, then GET, as fsspec asks
        Strange.asked.clear()
        with pytest.raises(RequestError, match=r"500.*does not answer .*in 8 attempts"):
            file_at(f"{url}500")
        assert len(Strange.asked) > 5
        with pytest.raises(RequestError, match="403: access refused"):
            list(find_files(f"{url}403"))
        with pytest.raises(OSError, match=r"truncated: it ends at byte .* of 100"):
            open_range(file_at(f"{url}206")).read()


def test_a_store_that_is_not_there(hasty: None, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="no protocol that fsspec knows"):
        file_at("gopher://x/y")
    with pytest.raises(FileNotFoundError, match="is not there"):
        file_at(s3 + "-none/x")
    with pytest.raises(FileNotFoundError):
        list(find_files(s3 + "-none"))
    with pytest.raises(RequestError, match=r"127.0.0.1:.*does not answer"):
        list(find_files(f"http://127.0.0.1:{free_port()}/x"))
    with (
        endpoint(f"http://127.0.0.1:{free_port()}"),
        pytest.raises(RequestError, match="does not answer"),
    ):
        list(find_files(s3))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(RequestError, match=r"pip install 'rostra\[gcs\]'"):
        list(find_files("gs://bucket/x"))
