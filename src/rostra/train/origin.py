"""A new run that starts from the weights of another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rostra.checkpoint import Checkpoint, newest_checkpoint, open_checkpoint
from rostra.errors import RequestError
from rostra.parallel import Engine
from rostra.store import RunFolder, write_json
from rostra.workers import on_first_rank


@dataclass(frozen=True)
class Origin:
    """A finished or running run whose weights a new run starts from."""

    path: Path
    step: int | None = None
    optimizer: bool = False  # its optimizer's state too

    @classmethod
    def parse(cls, text: str, optimizer: bool = False) -> Origin:
        """From `RUN` or `RUN@STEP`."""
        path, at, step = text.rpartition("@")
        if at and step.isdigit():
            return cls(Path(path), int(step), optimizer)
        return cls(Path(text), None, optimizer)

    def open(self) -> Checkpoint:
        folder = RunFolder(self.path)
        steps = on_first_rank(folder.steps)
        if self.step is not None and self.step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise RequestError(f"--from {self.path}@{self.step}: its checkpoints are: {known}")
        if self.step is not None:
            return open_checkpoint(folder.checkpoint(self.step))
        found, problems = newest_checkpoint(folder)
        if found is None:
            raise RequestError(f"--from {self.path}: no complete checkpoint {problems or ''}")
        return found


def recorded(folder: RunFolder, origin: Origin | None, new: bool) -> Origin | None:
    """The origin of the run, which is kept in its folder: resuming must not lose it.

    Raises RequestError when another one is asked for than the run was started with.
    """
    path = folder.path / "origin.json"
    known = None
    if path.exists():
        values = json.loads(path.read_text())
        known = Origin(Path(values["path"]), values["step"], values["optimizer"])
    if new and origin is not None:
        values = {"path": str(origin.path), "step": origin.step, "optimizer": origin.optimizer}
        write_json(path, values)
        return origin
    if origin not in (None, known):
        raise RequestError(f"{folder.path}: --from starts a new run, but this one exists")
    return known


def start_from(origin: Origin, engine: Engine, tokenizer: str, optimizer: str) -> None:
    """Weights of another run, and its optimizer's state if asked, at step 0 of this one."""
    checkpoint = origin.open()
    if checkpoint.data["tokenizer"] != tokenizer:
        raise RequestError(
            f"--from {origin.path}: its tokenizer is another, so its weights mean other tokens. "
            f"Set data.tokenizer to {{pretrained: {origin.path}/model}}."
        )
    own, theirs = optimizer, checkpoint.config["optimizer"]["name"]
    if origin.optimizer and own != theirs:
        raise RequestError(
            f"--from {origin.path} --with-optimizer: it was trained with {theirs}, and this "
            f"config has optimizer.name = {own}; use the same, or leave --with-optimizer out"
        )
    try:
        if origin.optimizer:
            values = {**checkpoint.values, "steps": 0}
            del values["scale"]  # of the losses there
            engine.load_state(checkpoint.reader(), values)
        else:
            engine.adopt(checkpoint.reader())
    except (ValueError, KeyError, RuntimeError) as error:
        raise RequestError(f"--from {origin.path}: does not fit this config: {error}") from error
