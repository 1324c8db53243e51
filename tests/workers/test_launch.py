"""Local ranks under the elastic agent: their ends, their output, signals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from rostra.errors import RequestError
from rostra.workers import start
from rostra.workers.group import cores
from rostra.workers.launch import _PassedOn

HERE = Path(__file__).parent
SCRIPT = "import sys; from rostra.workers import start; "
SCRIPT += "sys.exit(start(sys.argv[1:], 2, module='programs'))"


@pytest.fixture(autouse=True)
def _programs_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.fixture
def parent() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process that starts two ranks; killed after the test when it still lives."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SCRIPT, *arguments]
        started.append(subprocess.Popen(command, stderr=stderr))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    """The ranks' processes, once both have said that they run."""
    files = [folder / f"pid-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("codes", "code"),
    [(("0", "0"), 0), (("2", "2"), 2), (("75", "75"), 75), (("75", "4"), 4), (("0", "75"), 75)],
)
def test_exit_codes(codes: tuple[str, str], code: int) -> None:
    assert start(["codes", *codes], 2, "programs") == code


def test_one_rank_fails_and_the_other_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert start(["first", "4"], 2, "programs") == 4
    assert time.monotonic() - began < 20
    shown = capfd.readouterr().err
    assert "rank 1 of 2 failed with exit code 4" in shown
    assert "rank one has a reason" in shown


def test_a_message_of_all_ranks_is_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert start(["codes", "2", "2"], 2, "programs") == 2
    assert capfd.readouterr().err == ""


def test_only_rank_0_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT)
    assert start(["talk", "a b", "${local_rank} $$"], 2, "programs") == 0
    said = "said 0 ['talk', 'a b', '${local_rank} $$']\n"
    assert capfd.readouterr() == (said, "terminal 0 False\n")
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT))


def test_rank_0_sees_the_terminal(parent: Callable[..., subprocess.Popen[bytes]]) -> None:
    ours, theirs = pty.openpty()
    assert parent("talk", stderr=theirs).wait(60) == 0
    assert os.read(ours, 1000).strip() == b"terminal 0 True"
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_killed_rank(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert start(["die", str(int(signal.Signals[name]))], 2, "programs") == 4
    assert f"was killed by {name}" in capfd.readouterr().err


@pytest.mark.parametrize(("how", "code"), [("kill", 4), ("raise", 1)])
def test_the_first_to_fail_in_a_group_is_named(
    how: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 fails in its collective at the same moment, but not by itself."""
    assert start(["leave", how], 2, "programs") == code
    shown = capfd.readouterr().err
    assert "rostra: rank 1 of 2" in shown
    assert ("ValueError: the reason of rank 1" in shown) == (how == "raise")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_reaches_ranks_once_and_is_waited_for(
    number: signal.Signals, parent: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = parent("save", str(tmp_path), "1.5")
    pids(tmp_path)
    process.send_signal(number)
    if number == signal.SIGTERM:  # repeated by an impatient scheduler
        time.sleep(0.5)
        process.send_signal(number)
    assert process.wait(60) == 75
    assert process.stderr and process.stderr.read() == b""
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == [number.name] * 2


def test_a_stop_before_training_took_over(
    parent: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = parent("wait", str(tmp_path))
    pids(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert process.stderr and process.stderr.read() == b""


def test_a_stop_before_there_are_ranks_ends_the_start() -> None:
    with pytest.raises(SignalException), _PassedOn():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_impatience_ends_ranks_that_do_not_stop(
    parent: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = parent("save", str(tmp_path), "300")
    pids(tmp_path)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert process.wait(60) == 4


def test_ranks_do_not_outlive_their_parent(
    parent: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = parent("wait", str(tmp_path))
    ranks = pids(tmp_path)
    process.kill()
    until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), 10)


def test_watching_the_parent_where_the_kernel_does_not() -> None:
    script = "import os; from rostra.workers.rank import watch; watch(os.getppid() + 1, 0.01)"
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_ranks_of_rostra_form_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert start(["group", str(tmp_path)], 2, "programs") == 0
    share = max(1, cores() // 2)
    for rank in range(2):
        text = (tmp_path / f"group-{rank}").read_text()
        assert text == f"rostra {rank} 2 [3.0, 3.0] {share}"


def test_no_ranks_are_refused() -> None:
    with pytest.raises(RequestError, match="at the least"):
        start([], 0)
