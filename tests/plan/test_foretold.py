"""A run tells what its plan foretold beside what it measured, and where they part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rostra.api import Run
from rostra.events import Event, Events, JsonLines, read_events
from rostra.layout import Layout
from rostra.plan.foretold import Foretold
from rostra.plan.results import Candidate, Memory, Time
from rostra.report import History, page
from rostra.track import Progress
from support import tiny_run

LAYOUT = Layout(4, 1)
CANDIDATE = Candidate(
    layout=LAYOUT,
    memory=Memory({"parameters": 600, "activations": 400, "reserved": 5000}),
    time=Time(1.5, 0.4, 0.0, {}, optimizer=0.1),
    tokens_per_second=1024.0,
    mfu=0.5,
    hfu=0.5,
    hours=None,
    price=None,
    energy_kwh=None,
)


def run(
    seconds: list[float], memory: int | None, calibrated: bool = True, start: int = 0
) -> list[Event]:
    """The events of a process that takes such steps, from the step after `start`."""
    told: list[Event] = []
    events = Events()
    events.listeners += [told.append, Progress(), Foretold(CANDIDATE, events, calibrated)]
    counts = {"parameters": 1, "trainable_parameters": 1}
    last = start + len(seconds)
    events.emit("started", name="a", layout=LAYOUT.to_dict(), steps=last, step=start, **counts)
    for step, each in enumerate(seconds, start + 1):
        if step == start + 2 and memory is not None:
            events.emit("memory", step=step, bytes={"total": memory})
        common = {"loss": 1.0, "tokens": 2048, "learning_rate": 0.1, "gradient_norm": 1.0}
        events.emit("step", step=step, **common, seconds=each, accepted=True)
    return told


def only(told: list[Event], kind: str) -> Event:
    (found,) = [event for event in told if event.kind == kind]
    return found


def notices(told: list[Event]) -> list[str]:
    return [event["message"] for event in told if event.kind == "notice"]


def test_the_plan_comes_first_and_then_what_was_measured() -> None:
    told = run([9.0, 5.0, 2.1, 2.0, 1.9, 2.1, 2.0, 30.0, 30.0], 1050, start=7)
    assert [event.kind for event in told[:2]] == ["started", "plan"]
    plan = only(told, "plan")
    assert plan["memory_bytes"] == {
        "parameters": 600, "activations": 400, "reserved": 5000, "total": 6000,
    }  # fmt: skip
    assert (plan["step_seconds"], plan["tokens_per_second"]) == (2.0, 1024.0)
    checked = only(told, "plan_checked")
    assert checked["step"] == 7 + 7
    assert checked["planned"] == {
        "memory_bytes": 1000, "step_seconds": 2.0, "tokens_per_second": 1024.0,
    }  # fmt: skip
    assert checked["measured"] == {
        "memory_bytes": 1050, "step_seconds": 2.0, "tokens_per_second": 1024.0,
    }  # fmt: skip
    assert notices(told) == []


@pytest.mark.parametrize("calibrated", [True, False])
def test_notices_say_by_how_much_they_part_and_what_to_do(calibrated: bool) -> None:
    told = run([9.0, 5.0] + [3.0] * 6, 700, calibrated)
    memory, time = notices(told)
    assert "700 bytes of tensors, 30% less than the planned 1.0 kB" in memory
    assert "train.micro_batch_size" in memory
    assert "3 s, 50% more than the planned 2 s" in time
    assert "`rostra calibrate`" in time
    assert ("typical figures" in time) is not calibrated


def test_a_short_run_is_checked_at_its_end() -> None:
    assert only(run([9.0, 5.0, 2.2], 1000), "plan_checked")["measured"]["step_seconds"] == 2.2
    nothing = only(run([9.0], None), "plan_checked")["measured"]
    assert nothing == {"memory_bytes": None, "step_seconds": None, "tokens_per_second": None}


def test_the_report_shows_both(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = JsonLines()
    lines.open(path)
    for event in run([9.0, 5.0] + [2.5] * 5, 1000):
        lines(event)
    lines.close()
    assert {"plan", "plan_checked"} <= {event.kind for event in read_events(path)}
    shown = page(History.read(path), None)
    assert "Planned and measured" in shown
    assert "+25.0%" in shown
    assert "Planned and measured" not in page(History(), None)


def table(history: dict[str, Any]) -> str:
    return page(History(planned=history), None)


def test_before_it_is_checked_the_report_shows_the_plan_alone() -> None:
    assert "1,024" in table({"tokens_per_second": 1024.0})


def test_a_real_run_tells_both(corpus: Path, tmp_path: Path) -> None:
    told: list[Event] = []
    Run.open(tiny_run(corpus, tmp_path / "run")).train([told.append])
    kinds = [event.kind for event in told]
    assert kinds.index("started") < kinds.index("plan") < kinds.index("step")
    checked, plan = only(told, "plan_checked"), only(told, "plan")
    assert checked["planned"]["memory_bytes"] == plan["live_memory_bytes"]
    assert checked["measured"]["memory_bytes"] == only(told, "memory")["bytes"]["total"]
    steps = [event["seconds"] for event in told if event.kind == "step"][2:]
    assert min(steps) <= checked["measured"]["step_seconds"] <= max(steps)
    assert "Planned and measured" in (tmp_path / "run" / "report.html").read_text()
