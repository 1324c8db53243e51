"""A new run that starts from the weights of another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rostra.checkpoint import Checkpoint, newest_checkpoint, open_checkpoint
from rostra.errors import RequestError
from rostra.parallel import TorchEngine
from rostra.store import RunFolder


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
        if self.step is not None and self.step not in folder.steps():
            known = ", ".join(map(str, folder.steps())) or "none"
            raise RequestError(f"--from {self.path}@{self.step}: its checkpoints are: {known}")
        if self.step is not None:
            return open_checkpoint(folder.checkpoint(self.step))
        found, problems = newest_checkpoint(folder)
        if found is None:
            raise RequestError(f"--from {self.path}: no complete checkpoint {problems or ''}")
        return found


def start_from(origin: Origin, engine: TorchEngine, tokenizer: str) -> None:
    """Weights of another run, and its optimizer's state if asked, at step 0 of this one."""
    checkpoint = origin.open()
    if checkpoint.data["tokenizer"] != tokenizer:
        raise RequestError(
            f"--from {origin.path}: its tokenizer is another, so its weights mean other tokens. "
            f"Set data.tokenizer to {{pretrained: {origin.path}/model}}."
        )
    tensors = checkpoint.tensors()
    try:
        if origin.optimizer:
            engine.load_state(
                {k: v for k, v in tensors.items() if not k.startswith("random/")},
                {**checkpoint.values, "steps": 0},
            )
        else:
            kinds = ("model/", "master/")  # the later is the more exact
            engine.adopt(
                {k.removeprefix(x): v for x in kinds for k, v in tensors.items() if k.startswith(x)}
            )
    except (ValueError, KeyError, RuntimeError) as error:
        raise RequestError(f"--from {origin.path}: does not fit this config: {error}") from error
