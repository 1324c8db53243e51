"""The folder of a run: taking it, and what a run that is there already allows."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rostra.checkpoint import Checkpoint, newest_checkpoint
from rostra.config import Config, config_from_dict, read_config
from rostra.errors import RequestError
from rostra.events import Events
from rostra.store import Lock, RunFolder, remove_folder, sweep
from rostra.train.choose import check_resumable
from rostra.workers import on_first_rank

# What a run writes before its first checkpoint; nothing else of a folder is ever removed.
_EARLY = ("lock.json", "origin.json", "config.yaml", "plan.json", "events.jsonl", "tensorboard")


@contextlib.contextmanager
def claimed(folder: RunFolder) -> Iterator[tuple[bool, Lock]]:
    """The run's folder, locked; removed again when a new run's request proves wrong."""
    if folder.path.exists() and not folder.path.is_dir():
        raise RequestError(f"{folder.path}: is a file; choose another folder with run.output")
    made = [p for p in (folder.path, *folder.path.parents) if not p.exists()]
    strangers = [] if made else [p.name for p in folder.path.iterdir() if p.suffix != ".aside"]
    new = not folder.config.exists()
    if new and (others := sorted(set(strangers) - set(_EARLY))):
        raise RequestError(
            f"{folder.path}: holds {others[0]} and is no run; "
            "choose an empty or new folder with run.output"
        )
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"{folder.path}: cannot make this folder ({error.strerror}); choose another with "
            "run.output"
        ) from error
    try:
        with Lock(folder.path) as lock:
            yield new, lock
    except BaseException as error:
        nothing_yet = isinstance(error, RequestError) or not folder.config.exists()
        in_use = (folder.path / "lock.json").exists()
        if new and nothing_yet and not folder.steps() and not in_use:
            for own in (folder.path / name for name in _EARLY):
                shutil.rmtree(own) if own.is_dir() else own.unlink(missing_ok=True)
            for path in made:
                with contextlib.suppress(OSError):  # a parent that others use by now stays
                    shutil.rmtree(path) if path == folder.path else path.rmdir()
        raise


def resumable(
    folder: RunFolder, config: Config, events: Events, new_learning_rate: bool
) -> Checkpoint | None:
    """The checkpoint to go on from, after checking that the config still fits the run. All
    ranks call this.

    None when the run was stopped before it saved its first one. Raises RequestError when
    there are checkpoints and none is whole.
    """
    on_first_rank(lambda: sweep(folder.checkpoints))
    checkpoint, problems = newest_checkpoint(folder)
    if checkpoint is None and problems:
        listed = "\n  ".join(problem for _, problem in problems)
        raise RequestError(
            f"{folder.path}: none of its checkpoints is whole:\n  {listed}\n"
            "Restore one, or start a new run with another run.output."
        )
    for path, problem in problems:
        kept = on_first_rank(partial(_put_aside, path))
        events.notice(f"{problem}; kept as {kept}, going back to an older checkpoint")
    # keys that came later than the run get their defaults
    old = config_from_dict(
        checkpoint.config
        if checkpoint
        else on_first_rank(lambda: read_config(folder.config).model_dump(mode="json"))
    )
    check_resumable(
        old.model_dump(mode="json"),
        config.model_dump(mode="json"),
        str(folder.path),
        new_learning_rate,
    )
    return checkpoint


def _put_aside(path: Path) -> Path:
    """A damaged checkpoint, out of the way of a good one of the same step."""
    kept = path.with_name(f"damaged-{path.name}")
    if kept.exists():
        remove_folder(kept)
    path.rename(kept)
    return kept


def finished(folder: RunFolder, config: Config) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do."""
    final = folder.model.exists() or folder.adapter.exists()
    if not folder.summary.exists() or not final:
        return None
    old = read_config(folder.config).train
    same = (old.steps, old.tokens, old.epochs)
    if same != (config.train.steps, config.train.tokens, config.train.epochs):
        return None
    summary: dict[str, Any] = json.loads(folder.summary.read_text())
    return summary
