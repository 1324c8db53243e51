"""Prepared data on a store, and the bounded cache it comes through."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from rostra.config.data import DataSection
from rostra.config.loading import LoadTable
from rostra.data import Prepared, held_out, local_cache, open_prepared, prepare
from rostra.data.local_cache import CacheFull, LocalCache
from rostra.data.shards import Shards
from rostra.errors import RequestError
from stores import Quiet, S3Server, upload, web

SIZE = 3000


@pytest.fixture
def prepared(corpus: Path, section: Callable[..., DataSection]) -> Prepared:
    source = {"type": "text", "path": str(corpus)}
    return prepare(section(source, prepare={"shard_tokens": 500}), None, pytest.fail)


@pytest.fixture
def load(tmp_path: Path) -> LoadTable:
    return LoadTable(cache=str(tmp_path / "near"), cache_bytes=1 << 20)


@pytest.fixture
def blobs(tmp_path: Path) -> dict[str, tuple[str, int]]:
    """Files in the folder `far`, all of one size: name, then hash and size."""
    (tmp_path / "far").mkdir()
    found = {}
    for number in range(12):
        content = random.Random(number).randbytes(SIZE)
        (tmp_path / "far" / f"{number}").write_bytes(content)
        found[f"{number}"] = (hashlib.sha256(content).hexdigest(), SIZE)
    return found


def everything(prepared: Prepared | None) -> list[bytes]:
    """All that is used of prepared data."""
    if prepared is None:
        raise RequestError("not whole")
    held = [document.text.encode() for document in held_out(prepared)]
    tokens = [prepared.train[index].tokens.tobytes() for index in range(len(prepared.train))]
    return [*held, *tokens, prepared.tokenizer.backend_tokenizer.to_str().encode()]


def cut_or_flip(content: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.2:
        return content[: chance.randrange(len(content))]
    place = chance.randrange(len(content))
    flipped = content[place] ^ 1 << chance.randrange(8)
    return content[:place] + bytes([flipped]) + content[place + 1 :]


def test_prepared_data_on_a_store_through_a_dying_server(
    prepared: Prepared, load: LoadTable, s3: str, s3_server: S3Server
) -> None:
    """The server is killed in the middle, and comes back: the same documents all the same."""
    good = everything(prepared)
    upload(Path(prepared.folder), f"{s3}/data")
    far = open_prepared(f"{s3}/data", load)
    assert far is not None
    assert far.identity == prepared.identity
    assert far.train[0].tokens.tobytes() == prepared.train[0].tokens.tobytes()
    s3_server.kill()

    def come_back() -> None:
        time.sleep(0.5)
        again = S3Server(s3_server.port)
        s3_server.process = again.process
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(s3)
        upload(Path(prepared.folder), f"{s3}/data")

    with ThreadPoolExecutor(1) as other:
        back = other.submit(come_back)
        assert everything(far) == good
        back.result()
    assert open_prepared(f"{s3}/nothing", load) is None
    names = {path.name for path in Path(str(load.cache)).glob("[!.]*")}
    assert {
        hashlib.sha256(Path(load.cache or "", n).read_bytes()).hexdigest() for n in names
    } == names


@pytest.mark.parametrize(("where", "cases"), [("folder", 550), ("store", 80), ("cache", 370)])
def test_every_flipped_byte_and_cut_file_is_found(
    prepared: Prepared, load: LoadTable, where: str, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 in all, over shards, manifests, tokenizers and the cache."""
    monkeypatch.setattr(local_cache, "PAUSE", 0)
    monkeypatch.setattr(local_cache, "TRIES", 1)
    good = everything(prepared)
    near, far = Path(str(load.cache)), f"memory://{Path(prepared.folder).parent}"
    upload(Path(prepared.folder), far)
    everything(open_prepared(far, load))
    chance = random.Random(where)
    fs = fsspec.filesystem("memory")
    local = sorted(p for p in Path(prepared.folder).rglob("*") if p.is_file())
    stored = [str(path) for path in fs.find(far)]
    cached = sorted(near.glob("[!.]*"))
    assert len(stored) == len(local) >= len(cached) > 5
    unseen = []
    for _ in range(cases):
        path = Path(chance.choice({"folder": local, "store": stored, "cache": cached}[where]))
        old = fs.cat_file(str(path)) if where == "store" else path.read_bytes()
        bad = cut_or_flip(old, chance)
        if where == "store":
            fs.pipe_file(str(path), bad)
            for name in cached:
                name.unlink(missing_ok=True)
        else:
            path.write_bytes(bad)
        try:
            found = everything(open_prepared(prepared.folder if where == "folder" else far, load))
        except RequestError:
            assert where != "cache"
        else:
            assert found == good  # nothing wrong is ever used
            if where != "cache":  # where it is downloaded again
                unseen.append((path.name, old, bad))
        if where == "store":
            fs.pipe_file(str(path), old)
        elif where == "folder":
            path.write_bytes(old)
    # White space of the manifest may be other white space; nothing else goes unseen.
    for name, old, bad in unseen:
        assert name == "manifest.json", name
        assert b"".join(old.split()) == b"".join(bad.split())
    fs.rm(far, recursive=True)


def test_no_file_of_a_manifest_goes_by_another_name(
    prepared: Prepared, load: LoadTable, tmp_path: Path
) -> None:
    """No digest covers the names of files; a tokenizer would be loaded without its settings."""
    far = f"memory://{tmp_path}"
    upload(Path(prepared.folder), far)
    manifest = (Path(prepared.folder) / "manifest.json").read_bytes()
    bad = manifest.replace(b"tokenizer/tokenizer_config", b"uokenizer/tokenizer_config")
    assert bad != manifest
    fsspec.filesystem("memory").pipe_file(f"{tmp_path}/manifest.json", bad)
    assert open_prepared(far, load) is None


class Slow(Quiet):
    """Sends slowly, and remembers what was sent to its end."""

    complete: list[str]

    def copyfile(self, source: object, outputfile: object) -> None:
        while piece := source.read(SIZE // 10):  # type: ignore[attr-defined]
            time.sleep(0.1)
            outputfile.write(piece)  # type: ignore[attr-defined]
        self.complete.append(self.path)


def ask(folder: Path, url: str, sha256: str) -> None:
    """In a process of its own, or a thread: locks do not care."""
    content = LocalCache(folder, SIZE).map(url, sha256, SIZE)  # room for one: the rest goes, too
    assert hashlib.sha256(content).hexdigest() == sha256


def test_a_killed_downloader_lets_go_and_two_share_one_download(
    tmp_path: Path, blobs: dict[str, tuple[str, int]]
) -> None:
    Slow.complete = []
    near, sha256 = tmp_path / "near", blobs["0"][0]
    with web(tmp_path / "far", Slow) as site, ThreadPoolExecutor(2) as others:
        arguments = (near, f"{site}0", sha256)
        victim = multiprocessing.get_context("spawn").Process(target=ask, args=arguments)
        victim.start()
        while not (near / f".{sha256}.aside").exists():
            time.sleep(0.005)
        done = [others.submit(ask, *arguments) for _ in range(2)]
        time.sleep(0.2)
        assert Slow.complete == []
        victim.kill()
        for other in done:
            other.result()
        victim.join()
    assert len(Slow.complete) == 1
    assert [path.name for path in there(near)] == [sha256]


def test_two_readers_under_a_small_bound(
    tmp_path: Path, blobs: dict[str, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never beyond the bound, never a file removed that is mapped, always the right content."""
    monkeypatch.setattr(local_cache, "PAUSE", 0)
    near, bound = tmp_path / "near", 4 * SIZE
    near.mkdir()
    done = threading.Event()
    sizes: list[int] = []

    def watch() -> None:
        while not done.is_set():
            sizes.append(sum(path.stat().st_size for path in there(near)))

    def read(seed: int) -> int:
        chance, cache = random.Random(seed), LocalCache(near, bound)
        for _ in range(150):
            name = chance.choice(list(blobs))
            content = cache.map(str(tmp_path / "far" / name), *blobs[name])
            assert (near / blobs[name][0]).stat()  # while it is mapped
            assert hashlib.sha256(content).hexdigest() == blobs[name][0]
            del content
        return 1

    with ThreadPoolExecutor(3) as readers:
        readers.submit(watch)
        try:
            assert sum(readers.map(read, (1, 2))) == 2
        finally:
            done.set()
    assert 2 * SIZE <= max(sizes) <= bound
    left = {path.name for path in near.iterdir() if not path.name.startswith(".")}
    cache = LocalCache(near, bound)
    last = [cache.map(str(tmp_path / "far" / name), *blobs[name]) for name in "0123"]
    with pytest.raises(
        CacheFull, match=r"12,000 bytes there are in use .* data\.load\.cache_bytes"
    ):
        cache.map(str(tmp_path / "far" / "4"), *blobs["4"])
    del last[1]
    cache.map(str(tmp_path / "far" / "4"), *blobs["4"])
    now = {path.name for path in near.iterdir() if not path.name.startswith(".")}
    assert now == {blobs[name][0] for name in "0234"}
    assert left


def there(folder: Path) -> Iterator[Path]:
    """What the bound is about; a reader may rename one while they are counted."""
    for path in sorted(folder.iterdir()):
        if not path.name.endswith(".lock") and path.exists():
            yield path


def test_what_was_used_longest_ago_goes_and_own_shards_are_closed_for_room(
    prepared: Prepared, tmp_path: Path
) -> None:
    far = f"memory://{tmp_path}"
    upload(Path(prepared.folder), far)
    largest = max(path.stat().st_size for path in Path(prepared.folder).glob("train-*"))
    load = LoadTable(cache=str(tmp_path / "near"), cache_bytes=2 * largest)
    shards = getattr(open_prepared(far, load), "train")  # noqa: B009
    assert isinstance(shards, Shards)
    for index in (0, 1, 2, 0, 3):
        assert shards[index].tokens.tobytes() == prepared.train[index].tokens.tobytes()
    small = LoadTable(cache=load.cache, cache_bytes=100)
    with pytest.raises(
        RequestError, match=r"train-[0-]+4\S* has .* bytes, and the cache may have 100"
    ):
        getattr(open_prepared(far, small), "train")[4]  # noqa: B009


def test_what_is_not_the_caches_stays(tmp_path: Path, blobs: dict[str, tuple[str, int]]) -> None:
    """As where somebody names a folder for it that he uses for other things too."""
    near = tmp_path / "near"
    (near / "results").mkdir(parents=True)
    (near / "thesis.txt").write_bytes(b"x" * SIZE)
    cache = LocalCache(near, 2 * SIZE)
    for name, (sha256, size) in blobs.items():
        cache.map(str(tmp_path / "far" / name), sha256, size)
    assert {path.name for path in there(near) if path.name not in cached(blobs)} == {
        "results", "thesis.txt",
    }  # fmt: skip
    assert len(list(there(near))) == 4  # two of the cache, as many as there is room for


def cached(blobs: dict[str, tuple[str, int]]) -> set[str]:
    return {sha256 for sha256, _ in blobs.values()}


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_goes_wrong_is_named(
    tmp_path: Path, blobs: dict[str, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cache, "PAUSE", 0)
    far, near = tmp_path / "far", tmp_path / "near"
    cache = LocalCache(near, 4 * SIZE)
    with no_file_beyond(SIZE - 1), pytest.raises(RequestError, match="near: the disk is full"):
        cache.map(str(far / "0"), *blobs["0"])
    with pytest.raises(RequestError, match=r"far/0: came broken 3 times .*SHA-256"):
        cache.map(str(far / "0"), *blobs["1"])
    (far / "2").write_bytes((far / "2").read_bytes()[:-1])
    with pytest.raises(RequestError, match="far/2: came broken 3 times"):
        cache.map(str(far / "2"), *blobs["2"])
    with pytest.raises(RequestError, match=r"far/none: came broken .*No such file"):
        cache.map(str(far / "none"), *blobs["3"])
    with pytest.raises(RequestError, match=r"far/1/x: cannot be made .* data\.load\.cache"):
        LocalCache(far / "1" / "x", 4 * SIZE).map(str(far / "0"), *blobs["0"])
    assert [path.name for path in there(near)] == []
