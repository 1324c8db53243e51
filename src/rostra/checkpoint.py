"""Checkpoints: written aside, hashed, synced and renamed, so complete or absent; and loaded
only after every hash was found right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rostra.errors import RequestError
from rostra.layout import Layout
from rostra.parallel import Engine
from rostra.store import (
    RunFolder,
    broken_files,
    commit_folder,
    read_manifest,
    remove_folder,
    write_json,
)

FORMAT = 1
TENSORS, STATE = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands, beside what the engine holds: a few integers."""

    step: int  # optimizer steps done
    samples: int  # samples seen since the start, over all epochs
    tokens: int  # target tokens trained on
    bad_steps: int = 0  # in a row until here


def save_checkpoint(
    run: RunFolder,
    engine: Engine,
    position: Position,
    layout: Layout,
    config: dict[str, Any],
    data: dict[str, str],
) -> Path:
    """Weights, optimizer, schedule and loss scale (the engine's state), random state,
    position in the data, layout, config and the data's identity, as `checkpoints/step-N/`."""
    path = run.checkpoint(position.step)
    if read_manifest(path) is not None:  # saved already, by this run: the same content
        return path
    tensors, values = engine.state()
    with commit_folder(path, format=FORMAT, step=position.step) as folder:
        tensors = {name: value.contiguous() for name, value in (tensors | _random()).items()}
        save_file(tensors, folder / TENSORS)
        state = {
            "position": position.__dict__,
            "layout": layout.to_dict(),
            "config": config,
            "data": data,
            "engine": values,
        }
        write_json(folder / STATE, state)
    return path


def keep_newest(run: RunFolder, count: int) -> None:
    """Remove all but the newest `count` complete checkpoints."""
    for step in run.steps()[:-count]:
        remove_folder(run.checkpoint(step))


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose hashes were checked."""

    path: Path
    position: Position
    layout: Layout
    config: dict[str, Any]
    data: dict[str, str]
    values: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.path / TENSORS)

    def restore(self, engine: Engine) -> None:
        """Engine and random state as they were."""
        tensors = self.tensors()
        _set_random(tensors)
        engine.load_state(tensors, self.values)


def open_checkpoint(path: Path) -> Checkpoint:
    """Raises RequestError when the checkpoint is not complete, or a hash is not right."""
    manifest = read_manifest(path)
    if manifest is None:
        raise RequestError(f"{path}: not a complete checkpoint (it has no manifest)")
    if manifest.get("format") != FORMAT:
        raise RequestError(
            f"{path}: written in format {manifest.get('format')}, this version reads {FORMAT}"
        )
    if broken := broken_files(path, manifest):
        raise RequestError(f"{path}: damaged: {', '.join(broken)} is not what was written")
    state = json.loads((path / STATE).read_text())
    layout = Layout.from_dict(state["layout"])
    position = Position(**state["position"])
    return Checkpoint(path, position, layout, state["config"], state["data"], state["engine"])


def newest_checkpoint(run: RunFolder) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest checkpoint that is whole; newer ones with what was found wrong with them."""
    problems: list[tuple[Path, str]] = []
    for step in reversed(run.steps()):
        path = run.checkpoint(step)
        try:
            return open_checkpoint(path), problems
        except RequestError as error:
            problems.append((path, str(error)))
    return None, problems


def _random() -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random/cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors.pop("random/cpu"))
    cuda = tensors.pop("random/cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
