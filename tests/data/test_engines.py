from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import psutil
import pytest

from rostra.config.data import DataSection
from rostra.data import prepare
from rostra.data.documents import Read
from rostra.data.engines.local import LocalEngine
from rostra.data.folders import LocalFolder, write_json
from rostra.data.prepared import Prepared
from rostra.data.reading import make_reader
from rostra.data.sources import BadRecords
from rostra.data.tasks import Task, Tell, complete_tasks, record_name, tasks_of
from rostra.data.tokenizing import Tokenize
from rostra.errors import RequestError, RostraError
from support import need

Section = Callable[..., DataSection]

SMALL = {"task_bytes": 6000, "shard_tokens": 1500}  # some ten tasks, several shards each


def quiet(_: str) -> None:
    pass


def shards(prepared: Prepared) -> dict[str, str]:
    """SHA-256 by name, the tokenizer's files among them."""
    whole = json.loads(Path(prepared.folder, "manifest.json").read_text())
    for name, file in whole["files"].items():
        content = Path(prepared.folder, name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
    return {name: file["sha256"] for name, file in whole["files"].items()}


def sources(corpus: Path) -> list[dict[str, Any]]:
    """Files and lines; some are the same, some nearly, some are noise."""
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    texts = [text * 3 for text in texts[:12]] + [text * 3 + " again." for text in texts[:12]]
    noise = [f"{n} !!! ??? ### {n}" for n in range(9)]
    lines = [json.dumps({"text": text}) for text in [*texts, *texts[:3], *noise]]
    path = corpus.with_name("more.jsonl")
    path.write_text("\n".join(lines))
    return [{"type": "text", "path": str(corpus)}, {"type": "jsonl", "path": str(path)}]


CLEANED = {
    "clean": {"length": {"min_words": 10}},
    "duplicates": {"find": "minhash"},
}


@pytest.fixture
def make(corpus: Path, section: Section, tmp_path: Path) -> Callable[..., Prepared]:
    """Prepares with an engine, in a cache of its own."""
    every = sources(corpus)

    def made(
        engine: str, say: Callable[[str], None] = quiet, cache: str = "", **keys: Any
    ) -> Prepared:
        table = {"engine": engine, **SMALL, **keys}
        cache = cache or str(tmp_path / f"cache-{engine}")
        return prepare(section(*every, prepare=table, cache=cache, **CLEANED), None, say)

    return made


@pytest.fixture
def alone(make: Callable[..., Prepared]) -> Prepared:
    """What one process makes."""
    return make("process")


def test_processes_of_this_machine_write_the_same(
    make: Callable[..., Prepared], alone: Prepared
) -> None:
    together = make("local", workers=2)
    assert together.manifest == alone.manifest
    assert shards(together) == shards(alone)
    rows = together.manifest["per_source"]
    assert [row["rejected"] for row in rows] == [0, 9]
    assert rows[1]["duplicates"] >= 3 + 12  # all of a text again, and nearly all of it
    assert sum(rows[1][name] for name in ("documents", "rejected", "duplicates")) == 36
    assert len({shard["file"][:11] for shard in together.manifest["shards"]["train"]}) > 3
    assert not list(Path(together.folder).parent.glob(".*"))


@dataclass
class Deadly:
    """Dies of a task, or refuses it, or just notes who did it."""

    stage: ClassVar[str] = "deadly"
    work: LocalFolder
    how: str

    def __call__(self, task: Task, tell: Tell) -> None:
        tries = self.work.path / f"tries-{task.number}"
        with tries.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if self.how == "refuse" and task.number == 2:
            raise RequestError("this task is wrong")
        deaths = {"once": 1, "always": 9}.get(self.how, 0)
        if task.number == 2 and len(tries.read_text().split()) <= deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        tell(1, task.size)
        write_json(self.work, record_name(self.stage, task.number), {"documents": 1})


@pytest.fixture
def tasks(corpus: Path, section: Section) -> list[Task]:
    (source,) = section({"type": "text", "path": str(corpus)}).sources
    reader = make_reader(source, 0)
    return tasks_of([(reader, p) for p in reader.parts(BadRecords("fail", quiet))][:8], 100)


@pytest.mark.parametrize("how", ["once", "always", "refuse"])
def test_a_worker_that_dies_or_refuses(how: str, tasks: list[Task], tmp_path: Path) -> None:
    """PYTHONPATH lets workers find this module."""
    do = Deadly(LocalFolder(tmp_path), how)
    told: list[int] = []
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        running = LocalEngine(2).run(tasks, do, lambda count, size: told.append(count))
        if how == "once":
            assert sorted(t.number for t in running) == [t.number for t in tasks]
            assert complete_tasks(do.work, do.stage, tasks) == {t.number for t in tasks}
            assert sum(told) == len(tasks)
            workers = {pid for path in tmp_path.glob("tries-*") for pid in path.read_text().split()}
            assert len(workers) == 3
        else:
            kind, said = {
                "always": (RostraError, rf"data\.sources\.0, {tasks[2].parts[0].name}.* died 3"),
                "refuse": (RequestError, "this task is wrong"),
            }[how]
            with pytest.raises(kind, match=said):
                list(running)
    assert not [p for p in psutil.Process().children() if "engines.worker" in str(p.cmdline())]


def test_what_was_complete_is_not_done_again(
    make: Callable[..., Prepared], alone: Prepared, tmp_path: Path
) -> None:
    """Broken off again and again after a task or two, every task is done once."""
    done: list[tuple[str, int]] = []
    starts = 0
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Read, Tokenize):

            def counted(self: Any, task: Task, tell: Tell, original: Any = kind.__call__) -> None:
                if len(done) >= 3 * starts:
                    raise KeyboardInterrupt
                original(self, task, tell)
                done.append((self.stage, task.number))

            patch.setattr(kind, "__call__", counted)
        while True:
            starts += 1
            with contextlib.suppress(KeyboardInterrupt):
                again = make("process", cache=str(tmp_path / "broken-off"))
                break
    assert starts > 5
    assert len(done) == len(set(done))
    assert shards(again) == shards(alone)
    assert not list((tmp_path / "broken-off").glob(".*"))


def test_a_store_gets_the_same(
    make: Callable[..., Prepared], alone: Prepared, s3: str, tmp_path: Path
) -> None:
    far = make("process", cache=f"{s3}/cache")
    assert str(far.folder).startswith(s3)
    assert far.manifest == alone.manifest
    for index in range(len(alone.train)):
        assert far.train[index].tokens.tobytes() == alone.train[index].tokens.tobytes()
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    inside = str(far.folder).removeprefix("s3://")
    names = {path.removeprefix(inside).lstrip("/") for path in fs.find(s3)}
    assert names == {*shards(alone), "manifest.json"}  # no work is left
    assert make("process", pytest.fail, cache=f"{s3}/cache").key == alone.key


def test_spark_writes_the_same(
    make: Callable[..., Prepared], alone: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(find_spec("pyspark") is not None and shutil.which("java") is not None, "pyspark and Java")
    # Of six JVMs that live for seconds, compiling well and collecting in parallel take most.
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    with spark_cluster() as master:
        made = make(
            "spark", spark={"master": master, "settings": {"spark.executor.memory": "600m"}}
        )
    assert made.manifest == alone.manifest
    assert shards(made) == shards(alone)


@contextlib.contextmanager
def spark_cluster() -> Iterator[str]:
    """The URL of a standalone master that has two workers of one core."""
    import pyspark

    home = Path(pyspark.__file__).parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    start = [str(home / "bin" / "spark-class")]
    deploy = "org.apache.spark.deploy"
    own = ["-h", "127.0.0.1", "--webui-port", "0"]
    environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    commands = [[*start, f"{deploy}.master.Master", *own, "-p", str(port)]]
    commands += [[*start, f"{deploy}.worker.Worker", *own, "-c", "1", "-m", "700M", url]] * 2
    running = []
    try:
        for command in commands:
            quietly = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(subprocess.Popen(command, env=environment, **quietly))
            while command is commands[0] and not _listens(port):
                time.sleep(0.1)
        yield url
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_script_of_an_array_can_be_run_by_hand(
    make: Callable[..., Prepared], alone: Prepared, tmp_path: Path
) -> None:
    """As sbatch would: every element by itself, here one after the other."""
    elements: list[subprocess.Popen[bytes]] = []

    def heard(message: str) -> None:
        if found := re.match(r"submit (\S+\.sh) with sbatch", message):
            script = f"for k in 0 1; do SLURM_ARRAY_TASK_ID=$k bash {found[1]} || exit 1; done"
            elements.append(subprocess.Popen(["bash", "-c", script]))

    table = {"elements": 2, "submit": False, "poll_seconds": 0.2}
    made = make("slurm", heard, slurm=table)
    assert [element.wait() for element in elements] == [0, 0]  # of reading, of tokenizing
    assert made.manifest == alone.manifest
    assert shards(made) == shards(alone)
