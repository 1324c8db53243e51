"""The command `prepare` killed, alone and with its store: what it leaves, and how it goes on."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rostra import files
from rostra.config import read_config
from rostra.data import store_lock
from rostra.data.job import list_tasks
from rostra.data.sources import BadRecords
from rostra.data.store_lock import StoreLock
from stores import S3_ENVIRONMENT, Radosgw, S3Server, endpoint, have_moto, upload
from support import Done, ended, need, rostra, start

STAGES = ("read", "tokenized")
Config = Callable[..., Path]


def write_sources(folder: Path, copies: int) -> None:
    """Texts of which some are the same, nearly so, or noise."""
    folder.mkdir()
    words = "the quick brown fox jumps over a lazy dog while rain falls on some harbour".split()
    lines = []
    for number in range(60 * copies):
        text = f"Essay {number}. " + " ".join(random.Random(number).choices(words, k=160))
        (folder / f"{number:03d}.txt").write_text(text)
        lines.append((text, text + " again.", f"{number} !!! ??? ###")[number % 3])
    (folder / "more.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Writes a config that cleans, finds duplicates and trains a tokenizer, in some ten tasks
    of two processes."""

    def write(name: str, source: str, cache: str, **prepare: Any) -> Path:
        table = {"workers": 2, "task_bytes": 6000, "shard_tokens": 1500, **prepare}
        data = {
            "sources": [
                {"type": "text", "path": source},
                {"type": "jsonl", "path": files.join(source, "more.jsonl")},
            ],
            "tokenizer": {"vocabulary": 320},
            "sequence_length": 32,
            "held_out": 0.2,
            "clean": {"length": {"min_words": 10}},
            "duplicates": {"find": "minhash"},
            "prepare": table,
            "cache": cache,
        }
        path = tmp_path / f"{name}.yaml"
        run = {"name": "tiny", "output": str(tmp_path / "run")}
        rest = {"model": {"preset": "tiny"}, "train": {"steps": 1}}
        path.write_text(json.dumps({"run": run, "data": data, **rest}))
        return path

    return write


def hashes(result: str) -> dict[str, str]:
    """What the manifest says of all files, once they are seen to be so."""
    manifest = json.loads(files.read_bytes(files.join(result, "manifest.json")))
    for name, said in manifest["files"].items():
        file = files.file_at(files.join(result, *name.split("/")))
        assert files.hash_file(file) == said["sha256"]
    return {name: said["sha256"] for name, said in manifest["files"].items()}


def prepared(done: Done) -> str:
    """Where a command that ended well left its result."""
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["path"])


def records(cache: Path) -> dict[str, tuple[int, int]]:
    """Of complete tasks, with what tells whether they were written again."""
    found = {}
    for stage in STAGES:
        for path in cache.glob(f".work-*/{stage}/*.json"):
            with contextlib.suppress(FileNotFoundError):
                found[f"{stage}/{path.name}"] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


def kill_after(process: subprocess.Popen[str], cache: Path, count: int, seconds: float) -> bool:
    """Kill it a while after so many tasks are complete; false if it has ended before."""
    while len(records(cache)) < count and process.poll() is None:
        time.sleep(0.002)
    time.sleep(seconds)
    process.kill()
    return process.wait() == -signal.SIGKILL


def disturbed(config: Config, folder: Path, kills: Iterator[tuple[int, float]]) -> None:
    """Prepare with kills after so many complete tasks, and so many seconds: the result is the
    undisturbed one's, and what was complete is never done again."""
    cache = folder / "cache"
    alone = prepared(
        rostra(
            "prepare",
            config("alone", str(folder / "in"), str(folder / "alone"), engine="process"),
            "--json",
        )
    )
    path = config("killed", str(folder / "in"), str(cache))
    before: dict[str, tuple[int, int]] = {}
    for count, seconds in kills:
        process = start("prepare", path, "--json")
        assert kill_after(process, cache, count, seconds)
        process.communicate()
        now = records(cache)
        assert before.items() <= now.items()
        assert len(now) >= count
        before = now
    done = ended(start("prepare", path, "--json"))
    result = Path(prepared(done))
    assert "going on: " in done.stderr
    assert hashes(str(result)) == hashes(alone)
    for shard in result.glob("*.arrow"):
        if record := before.get(f"tokenized/{shard.stem.split('-')[1]}.json"):
            assert shard.stat().st_mtime_ns <= record[1]
    assert json.loads((result / "manifest.json").read_text()) == json.loads(
        Path(alone, "manifest.json").read_text()
    )
    assert not list(cache.glob(".*"))


def tasks_of(path: Path) -> int:
    return len(list_tasks(read_config(path).data, BadRecords("fail", print)))


def test_killed_in_each_stage(config: Config, tmp_path: Path) -> None:
    write_sources(tmp_path / "in", 1)
    tasks = tasks_of(config("killed", str(tmp_path / "in"), ""))
    assert tasks >= 8
    disturbed(config, tmp_path, iter([(3, 0.0), (tasks, 0.01), (tasks + 3, 0.0)]))


@pytest.mark.soak
def test_killed_at_ten_random_points(config: Config, tmp_path: Path) -> None:
    write_sources(tmp_path / "in", 6)
    every = 2 * tasks_of(config("killed", str(tmp_path / "in"), ""))
    chance = random.Random(5)
    counts = sorted(chance.sample(range(1, every - 12), 10))
    disturbed(config, tmp_path, iter([(count, chance.uniform(0, 0.1)) for count in counts]))


@pytest.fixture
def store() -> Iterator[S3Server]:
    """A server of the test's own."""
    need(have_moto(), "moto[server], s3fs")
    server = S3Server()
    with pytest.MonkeyPatch.context() as environment, endpoint(server.address):
        for name, value in S3_ENVIRONMENT.items():
            environment.setenv(name, value)
        yield server
    server.kill()


def fill(folder: Path) -> None:
    fsspec.filesystem("s3").mkdir("s3://bucket")
    upload(folder, "s3://bucket/in")


def complete_on_store() -> int:
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    return sum(p.endswith(".json") and "/read/" in p for p in fs.find("s3://bucket/cache"))


def wait_until(found: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not found():
        if process.poll() is not None:
            pytest.fail(f"ended early: {process.communicate()[1]}")
        time.sleep(0.02)


def test_the_store_is_killed_and_has_lost_all(
    config: Config, store: S3Server, tmp_path: Path
) -> None:
    """The command says what happened; started again, it makes the same."""
    write_sources(tmp_path / "in", 1)
    local = config("alone", str(tmp_path / "in"), str(tmp_path / "alone"), engine="process")
    alone = hashes(prepared(rostra("prepare", local, "--json")))
    fill(tmp_path / "in")
    path = config("far", "s3://bucket/in", "s3://bucket/cache")
    process = start("prepare", path, "--json")
    wait_until(lambda: complete_on_store() >= 3, process)
    store.kill()
    again = S3Server(store.port)
    try:
        fill(tmp_path / "in")
        done = ended(process)
        assert done.returncode in (0, 2), done.stderr
        assert "Traceback" not in done.stderr
        assert hashes(prepared(rostra("prepare", path, "--json"))) == alone
    finally:
        again.kill()


@pytest.mark.soak
def test_the_stores_gateway_is_killed_again_and_again(config: Config, tmp_path: Path) -> None:
    """What it stored is kept, and the command goes on as if nothing had been."""
    need(all(map(shutil.which, ("radosgw", "ceph-mon", "ceph-osd"))), "radosgw, ceph-mon, ceph-osd")
    write_sources(tmp_path / "in", 3)
    local = config("alone", str(tmp_path / "in"), str(tmp_path / "alone"), engine="process")
    alone = hashes(prepared(rostra("prepare", local, "--json")))
    with (
        tempfile.TemporaryDirectory(prefix="ceph-") as folder,
        Radosgw(Path(folder)) as gateway,
        pytest.MonkeyPatch.context() as environment,
    ):
        for name, value in S3_ENVIRONMENT.items():
            environment.setenv(name, value)
        environment.setenv("AWS_ACCESS_KEY_ID", gateway.key)
        environment.setenv("AWS_SECRET_ACCESS_KEY", gateway.secret)
        with endpoint(gateway.address):
            fill(tmp_path / "in")
            process = start(
                "prepare", config("far", "s3://bucket/in", "s3://bucket/cache"), "--json"
            )
            for count in (2, 8, 15):
                wait_until(lambda least=count: complete_on_store() >= least, process)
                gateway.restart()
            assert hashes(prepared(ended(process))) == alone


@pytest.mark.parametrize("first", ["goes on", pytest.param("is killed", marks=pytest.mark.soak)])
def test_two_at_once_towards_one_store(
    first: str, config: Config, store: S3Server, tmp_path: Path
) -> None:
    """The second waits for the first: for its result, or to go on with its work."""
    write_sources(tmp_path / "in", 1)
    fill(tmp_path / "in")
    path = config("far", "s3://bucket/in", "s3://bucket/cache")
    one = start("prepare", path, "--json")
    wait_until(lambda: complete_on_store() >= 2, one)
    one.send_signal(signal.SIGSTOP)
    two = start("prepare", path, "--json")
    assert two.stderr is not None
    said = two.stderr.readline()
    assert f"process {one.pid} on {socket.gethostname()}" in said
    assert "waiting for it" in said
    if first == "goes on":
        one.send_signal(signal.SIGCONT)
        assert prepared(ended(one)) == prepared(ended(two))
    else:
        one.kill()
        one.communicate()
        done = ended(two)
        assert "has stopped without a word" in done.stderr
        assert "going on: " in done.stderr
        hashes(prepared(done))
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    (result,) = fs.ls("s3://bucket/cache")  # neither lock nor work
    assert fs.exists(f"{result}/manifest.json")


def test_a_lock_that_is_not_renewed_is_taken_over(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RENEWED_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(store_lock, name, 0.05)
    monkeypatch.setattr(store_lock, "STALE_SECONDS", 0.6)
    monkeypatch.setattr(store_lock, "SETTLED_SECONDS", 0.2)
    url = f"{s3}/cache/.lock"
    files.put_bytes(b'{"host": "elsewhere", "process": 7, "since": "Monday"}', url)
    said: list[str] = []
    began = time.monotonic()
    with StoreLock(url, said.append):
        assert time.monotonic() - began > 0.6
        assert json.loads(files.read_bytes(url))["host"] == socket.gethostname()
        time.sleep(1)
        assert json.loads(files.read_bytes(url))["renewed"] > 1
    assert [line.split(";")[1] for line in said] == [" waiting for it", " going on with its work"]
    assert "process 7 on elsewhere" in said[1]
    assert "Monday" in said[1]
    assert not files.exists(url)
    gone = subprocess.Popen(["true"])
    gone.wait()
    owner = {"host": socket.gethostname(), "process": gone.pid, "process_started": 0}
    files.put_bytes(json.dumps(owner).encode(), url)
    monkeypatch.setattr(store_lock, "STALE_SECONDS", 600)
    with StoreLock(url, said.append):
        assert f"process {gone.pid} on {socket.gethostname()}" in said[2]
        assert "stopped without a word" in said[2]
    assert files.put_new(b"1", url)
    assert not files.put_new(b"2", url)
    assert files.read_bytes(url) == b"1"
