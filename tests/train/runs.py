"""What tests of whole runs share: what is in a run's folder, and whether two are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rostra.events import Event, read_events


def write(path: Path, values: dict[str, Any]) -> Path:
    """A config file with these values."""
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


def of_kind(path: Path, kind: str) -> list[Event]:
    """The events of one kind of the run in `path`."""
    return [event for event in read_events(path / "events.jsonl") if event.kind == kind]


def losses(path: Path) -> dict[int, float]:
    """The loss of every step; the later of two lines wins."""
    found = {event["step"]: event["loss"] for event in of_kind(path, "step")}
    assert list(found) == list(range(1, len(found) + 1))
    return found


def weights(path: Path) -> dict[str, Tensor]:
    """Of the final model."""
    return load_file(path / "model" / "model.safetensors")


def assert_same_run(one: Path, two: Path) -> None:
    """Bit by bit."""
    assert losses(one) == losses(two)
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
