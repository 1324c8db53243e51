from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rostra.errors import RequestError
from rostra.store import (
    Lock,
    RunFolder,
    broken_files,
    commit_folder,
    read_manifest,
    sweep,
    write_file,
)


def test_a_committed_folder_is_complete_and_hashed(tmp_path: Path) -> None:
    with commit_folder(tmp_path / "a", step=7) as aside:
        (aside / "deep").mkdir()
        (aside / "deep" / "x").write_bytes(b"content")
    manifest = read_manifest(tmp_path / "a")
    assert manifest is not None
    assert manifest["step"] == 7
    assert broken_files(tmp_path / "a", manifest) == []
    (tmp_path / "a" / "deep" / "x").write_bytes(b"contenT")
    assert broken_files(tmp_path / "a", manifest) == ["deep/x"]
    (tmp_path / "a" / "deep" / "x").unlink()
    assert broken_files(tmp_path / "a", manifest) == ["deep/x"]


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), commit_folder(tmp_path / "a") as aside:
        (aside / "x").write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    program = """
        import os, pathlib, signal, sys
        from rostra.store import commit_folder
        with commit_folder(pathlib.Path(sys.argv[1]) / "a") as aside:
            (aside / "x").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert read_manifest(tmp_path / "a") is None
    host = socket.gethostname().replace(".", "-")
    living = tmp_path / f".b.{host}.{os.getpid()}.aside"
    elsewhere = tmp_path / ".b.elsewhere.999999999.aside"
    living.mkdir()
    elsewhere.mkdir()
    sweep(tmp_path)
    assert not left.exists()
    assert living.exists()
    assert elsewhere.exists()


def test_a_full_disk_is_one_message_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_file(path, "old")
    program = """
        import pathlib, resource, signal, sys
        from rostra.errors import RequestError
        from rostra.store import write_file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_file(pathlib.Path(sys.argv[1]), "x" * 5000)
        except RequestError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "disk is full" in printed
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_use_is_refused_and_then_free_again(tmp_path: Path) -> None:
    with Lock(tmp_path), pytest.raises(RequestError, match=f"in use by process {os.getpid()}"):
        Lock(tmp_path).__enter__()
    with Lock(tmp_path) as lock:
        assert lock.notice is None


def test_a_stale_lock_is_taken_over_and_explained(tmp_path: Path) -> None:
    program = """
        import os, pathlib, signal, sys
        from rostra.store import Lock
        Lock(pathlib.Path(sys.argv[1])).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=False)
    assert (tmp_path / "lock.json").exists()
    with Lock(tmp_path) as lock:
        assert lock.notice is not None
        assert "no longer running" in lock.notice


def test_a_lock_of_another_host_is_never_taken(tmp_path: Path) -> None:
    lock = {"host": "elsewhere", "process": 1, "process_started": 0, "since": "yesterday"}
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    with pytest.raises(RequestError, match=r"elsewhere.*delete"):
        Lock(tmp_path).__enter__()


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.steps() == []
    for step in (100, 20):
        with commit_folder(run.checkpoint(step)):
            pass
    run.checkpoint(300).mkdir()
    assert run.steps() == [20, 100]
