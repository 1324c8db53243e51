"""The engine `slurm` on a cluster of two nodes, both on this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stores import free_port
from support import ended, need, refused, rostra, start

pytestmark = pytest.mark.soak

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
NODES = ("n1", "n2")

CONF = """ClusterName=rostra
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=2000\n"


class Cluster:
    """Slurm's daemons and munge's, started by hand; all that they write is in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        host = socket.gethostname()
        conf = CONF.format(host=host, control=free_port(), folder=folder)
        conf += "".join(NODE.format(name=n, host=host, port=free_port()) for n in NODES)
        conf += f"PartitionName=all Nodes={','.join(NODES)} Default=YES State=UP\n"
        self.conf = folder / "slurm.conf"
        self.conf.write_text(conf)
        (folder / "state").mkdir()
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def __enter__(self) -> Cluster:
        try:
            files = {"key-file": "key", "pid-file": "munge.pid", "log-file": "munge.log"}
            files |= {"seed-file": "seed", "socket": "munge"}
            places = [f"--{name}={self._folder / file}" for name, file in files.items()]
            self._start("munged", "--foreground", "--force", *places)
            while not (self._folder / "munge").exists():
                time.sleep(0.1)
            self._start("slurmctld", "-D", "-f", str(self.conf))
            for node in NODES:
                self._start("slurmd", "-D", "-f", str(self.conf), "-N", node)
            ends = time.monotonic() + 60
            while self._told("sinfo", "--noheader", "--format=%T") != "idle":
                if time.monotonic() > ends:
                    pytest.fail(self._told("sinfo", "--long", "--Node"))
                time.sleep(0.5)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        ends = time.monotonic() + 20
        while self._told("squeue", "--noheader") and time.monotonic() < ends:
            time.sleep(0.2)  # a cancelled job's last step is no child of these
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _start(self, program: str, *arguments: str) -> None:
        path = shutil.which(program)
        assert path
        with (self._folder / f"{program}.out").open("ab") as out:
            self._processes.append(subprocess.Popen([path, *arguments], stdout=out, stderr=out))

    def _told(self, *command: str) -> str:
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        ).stdout.strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    need(all(map(shutil.which, PROGRAMS)) and os.geteuid() == 0, "slurm-wlm and munge, for root,")
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,  # a short path, for the socket
        Cluster(Path(folder)) as running,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("SLURM_CONF", str(running.conf))
        yield running
    names = {"munged", "slurmctld", "slurmd", "slurmstepd"}
    left = [p for p in psutil.process_iter(["name"]) if p.info["name"] in names]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive


def write(path: Path, corpus: Path, engine: str, **keys: Any) -> Path:
    slurm = {"elements": 3, "poll_seconds": 0.5}
    data = {
        "sources": [{"type": "text", "path": str(corpus)}],
        "tokenizer": {"vocabulary": 320},
        "sequence_length": 32,
        "held_out": 0.2,
        "duplicates": {"find": "exact"},
        "cache": str(path.with_name(f"cache-{engine}")),
        "prepare": {"engine": engine, "task_bytes": 3000, "slurm": slurm},
        **keys,
    }
    run = {"name": "tiny", "output": str(path.with_name("run"))}
    rest = {"model": {"preset": "tiny"}, "train": {"steps": 1}}
    path.write_text(json.dumps({"run": run, "data": data, **rest}))
    return path


def elements(cache: Path) -> list[psutil.Process]:
    """The processes of elements that work for this cache."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "rostra.data.engines.element" in command and str(cache) in " ".join(command):
            found.append(process)
    return found


def test_an_array_writes_the_same_though_an_element_is_killed(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    alone = rostra("prepare", write(tmp_path / "alone.yaml", corpus, "process"), "--json")
    path = write(tmp_path / "array.yaml", corpus, "slurm")
    process = start("prepare", path, "--json")
    while not (running := elements(tmp_path / "cache-slurm")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    running[0].kill()
    done = ended(process)
    assert done.returncode == 0, done.stderr
    assert "submitted as Slurm job" in done.stderr
    assert "element 0 on n" in done.stderr or "element 1 on n" in done.stderr
    assert "FAILED" in done.stderr
    assert "tasks that are left" in done.stderr
    manifests = [
        json.loads(Path(json.loads(d.stdout)["path"], "manifest.json").read_text())
        for d in (alone, done)
    ]
    assert manifests[0] == manifests[1]
    assert not elements(tmp_path / "cache-slurm")


def test_what_fails_is_named_with_its_element(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    (corpus / "31.txt").write_bytes(b"\xff\xfe\xfd")
    path = write(tmp_path / "bad.yaml", corpus, "slurm")
    done = ended(start("prepare", path, "--json"))
    refused(done, "element ", f" on {socket.gethostname()}: ", "31.txt")
