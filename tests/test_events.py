from __future__ import annotations

from pathlib import Path

import pytest

from rostra.events import Event, Events, JsonLines, read_events


def test_events_reach_every_listener_and_the_file(tmp_path: Path) -> None:
    seen: list[Event] = []
    lines = JsonLines()
    events = Events(clock=lambda: 12.5, listeners=[seen.append, lines])
    events.notice("before the file is there")
    lines.open(tmp_path / "events.jsonl")
    events.emit("stopped", step=3, reason="SIGTERM")
    lines.close()
    assert [e.kind for e in seen] == ["notice", "stopped"]
    assert list(read_events(tmp_path / "events.jsonl")) == seen


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    lines = JsonLines()
    lines.open(tmp_path / "events.jsonl")
    Events(listeners=[lines]).emit(
        "evaluation",
        step=1,
        loss=float("nan"),
        perplexity=float("inf"),
        bits_per_byte=1.0,
        seconds=1.0,
    )
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["loss"], event["perplexity"], event["bits_per_byte"]) == (None, None, 1.0)


def test_an_event_must_be_complete() -> None:
    with pytest.raises(ValueError, match="reason"):
        Events().emit("stopped", step=3)


def test_a_line_cut_by_a_kill_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1, "event": "notice", "message": "a"}\n{"time": 2, "eve')
    lines = JsonLines()
    lines.open(path)
    Events(listeners=[lines]).notice("b")
    lines.close()
    assert [event["message"] for event in read_events(path)] == ["a", "b"]
