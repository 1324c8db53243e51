from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rostra.events import Events
from rostra.track import Progress, TensorBoard, show_summary


def _start(events: Events, steps: int, step: int = 0) -> None:
    events.emit(
        "started",
        name="demosthenes",
        layout={},
        parameters=1000,
        trainable_parameters=1000,
        steps=steps,
        step=step,
    )


def _steps(events: Events, first: int, last: int, offset: float = 0.0) -> None:
    for step in range(first, last + 1):
        events.emit(
            "step",
            step=step,
            loss=5.0 / step + offset,
            tokens=1000,
            learning_rate=1e-3,
            gradient_norm=0.5,
            seconds=0.5,
            accepted=True,
        )


def _rest(events: Events, step: int) -> None:
    events.emit("memory", step=step, bytes={"parameters": 4000, "total": 5_000_000})
    events.emit("evaluation", step=step, loss=2.0, perplexity=7.39, bits_per_byte=1.5, seconds=1.0)
    events.emit("generation", step=step, prompt="To ", text="be\n\x1b[2Jor [red]not[/]")
    events.emit("checkpoint", step=step, path=f"checkpoints/step-{step}", seconds=0.1)
    events.notice("one document was skipped")


def test_a_pipe_gets_plain_lines() -> None:
    stream = io.StringIO()
    progress = Progress(stream, log_every=10)
    events = Events(listeners=[progress])
    events.notice("before the start")
    _start(events, 25)
    _steps(events, 1, 10)
    _rest(events, 10)
    _steps(events, 11, 25)
    events.emit("finished", step=25, summary={})
    progress.close()
    text = stream.getvalue()
    lines = [line for line in text.splitlines() if re.match(r"step \d+/25 ", line)]
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert lines[0].endswith("loss 0.5000  lr 1.0e-03  gradient 0.5  2,000 tokens/s  0:00:08 left")
    assert "5.0 MB" in lines[1]
    assert "step 10: held-out loss 2.0000, perplexity 7.39, 1.5000 bits per byte" in text
    assert "\x1b" not in text, "what a model writes must not steer a terminal"
    assert "or [red]not[/]" in text
    assert "before the start" in text
    assert "one document was skipped" in text
    assert "finished at step 25" in text


def test_unknown_values_and_a_stop_are_shown() -> None:
    stream = io.StringIO()
    events = Events(listeners=[Progress(stream, log_every=1)])
    _start(events, 5, step=3)
    events.emit(
        "step",
        step=4,
        loss=float("nan"),
        tokens=10,
        learning_rate=0.1,
        gradient_norm=None,
        seconds=0.0,
        accepted=False,
    )
    events.emit("evaluation", step=4, loss=1.0, perplexity=None, bits_per_byte=None, seconds=0.1)
    events.emit("stopped", step=4, reason="SIGTERM")
    text = stream.getvalue()
    assert "from step 3" in text
    assert "loss nan" in text
    assert "gradient -" in text
    assert "stopped at step 4: SIGTERM" in text


_ON_A_TERMINAL = """
import sys; sys.path.insert(0, sys.argv[1])
from test_track import Events, Progress, _rest, _start, _steps
progress = Progress()
events = Events(listeners=[progress])
_start(events, 20)
_steps(events, 1, 10)
_rest(events, 10)
_steps(events, 11, 20)
progress.close()
"""


def test_a_terminal_gets_a_bar_with_lines_above_it() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_A_TERMINAL, str(Path(__file__).parent)],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.stdout is not None
    assert process.stdout.read() == b""
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "20/20" in text
    assert "━" in text
    assert "tokens/s" in text
    assert "held-out loss 2.0000" in text
    assert "one document was skipped" in text
    assert "\x1b[2J" not in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is given back"


def _scalars(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 0)
    events = Events(clock=lambda: 1234.5, listeners=[board])
    _start(events, 10)
    _steps(events, 1, 10)
    _rest(events, 10)
    board.close()
    read = _scalars(tmp_path)
    assert set(read.Tags()["scalars"]) == {
        "train/loss",
        "train/gradient_norm",
        "train/learning_rate",
        "train/tokens_per_second",
        "memory/parameters",
        "memory/total",
        "eval/loss",
        "eval/perplexity",
        "eval/bits_per_byte",
    }
    losses = read.Scalars("train/loss")
    assert [x.step for x in losses] == list(range(1, 11))
    assert losses[4].value == pytest.approx(1.0)
    assert losses[4].wall_time == 1234.5
    assert read.Scalars("train/tokens_per_second")[0].value == 2000


def test_tensorboard_has_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, 0)
    _steps(Events(clock=lambda: 1.0, listeners=[first]), 1, 8)
    first.close()
    second = TensorBoard(tmp_path, 5)  # went on from the checkpoint of step 5
    _steps(Events(clock=lambda: 2.0, listeners=[second]), 6, 10, offset=100.0)
    second.close()
    losses = _scalars(tmp_path).Scalars("train/loss")
    assert [x.step for x in losses] == list(range(1, 11))
    assert [x.value > 100 for x in losses] == [False] * 5 + [True] * 5


def test_tensorboard_has_all_up_to_a_checkpoint_without_being_closed(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 0)
    events = Events(listeners=[board])
    _steps(events, 1, 4)
    events.emit("checkpoint", step=4, path="checkpoints/step-4", seconds=0.1)
    assert len(_scalars(tmp_path).Scalars("train/loss")) == 4
    board.close()


def test_importing_track_does_not_import_tensorboard() -> None:
    code = (
        "import sys, rostra.track; sys.exit('tensorboard' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_summary_names_results_files_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    (run / "report.html").touch()
    summary = {
        "steps": 300,
        "loss": 3.25,
        "eval_loss": None,
        "bits_per_byte": 1.9,
        "xz_bits_per_byte": 2.07,
        "peak_memory_bytes": 123_000_000,
        "seconds": 400.2,
        "generated": "def [bold]main[/bold]():",
    }
    show_summary(summary, run)
    text = capsys.readouterr().out
    for part in ("300", "3.2500", "1.9000", "2.0700", "123.0 MB", "0:06:40", "[bold]main[/bold]"):
        assert part in text
    assert f"rostra generate '{run}'" in text
    assert "report.html" in text
    assert "loss.png" not in text, "only files that are there"
    assert "held-out loss" not in text
