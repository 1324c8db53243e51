"""Checkpoints: written aside by all ranks, each its own parts, hashed, synced and renamed, so
complete or absent; and loaded, under any layout, only after every hash was found right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from rostra.errors import RequestError
from rostra.layout import Layout
from rostra.pieces import INDEX, Piece, PieceReader, Reader, index_file, merge, write_pieces
from rostra.store import (
    RunFolder,
    broken_files,
    commit_folder,
    explain_full_disk,
    read_manifest,
    remove_folder,
    write_file,
    write_json,
)
from rostra.workers import on_every_rank, on_first_rank, this_rank, world_size

FORMAT = 2
STATE = "state.json"
TENSORS_1 = "state.safetensors"  # of format 1: all tensors, whole, in one file

T = TypeVar("T")


class Stateful(Protocol):
    """What a checkpoint needs of an engine. Its state comes in groups, one at least: a group is
    in memory until the next is asked for."""

    def state(self) -> tuple[Iterable[dict[str, Piece]], dict[str, Any]]: ...

    def load_state(self, reader: Reader, values: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Position:
    """Where a run stands, beside what the engine holds: a few integers."""

    step: int  # optimizer steps done
    samples: int  # samples seen since the start, over all epochs
    tokens: int  # target tokens trained on
    bad_steps: int = 0  # in a row until here
    mixture: dict[str, Any] | None = None  # of sources by weight: see `Mixture.state`
    lanes: list[Any] | None = None  # of sources that are streamed: see `StreamLoader.cursors`


def save_checkpoint(
    run: RunFolder,
    engine: Stateful,
    position: Position,
    layout: Layout,
    config: dict[str, Any],
    data: dict[str, str],
) -> Path:
    """Weights, optimizer, schedule and loss scale (the engine's state), random states,
    position in the data, layout, config and the data's identity, as `checkpoints/step-N/`.

    All ranks call this; each writes and hashes `part-RANK.safetensors` in the folder they
    share (`part-RANK-1.safetensors` and so on, of a state that comes in groups), and rank 0 the
    rest. Memory holds a group and what `write_pieces` needs. A rank that cannot write makes all
    raise, and nothing is left.
    """
    path = run.checkpoint(position.step)
    if on_first_rank(lambda: read_manifest(path) is not None):
        return path  # saved already, by this run: the same content
    groups, values = engine.state()
    state = {
        "position": position.__dict__,
        "layout": layout.to_dict(),
        "config": config,
        "data": data,
        "engine": values,
        "ranks": world_size(),
    }
    secured: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        aside = commit_folder(path, secured, format=FORMAT, step=position.step)
        folder = on_first_rank(lambda: stack.enter_context(aside))
        records, indexes = _write_parts(path, folder, groups)
        secured.update(records)

        def finish() -> None:
            write_json(folder / STATE, state)
            write_file(folder / INDEX, json.dumps(merge(indexes)))
            stack.close()  # the manifest, and the folder's name

        on_first_rank(finish)
    return path


def _write_parts(
    path: Path, folder: Path, groups: Iterable[dict[str, Piece]]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """All parts' records for the manifest and, on rank 0, their indexes."""
    index: dict[str, Any] = {}
    random = _random()

    def write() -> dict[str, dict[str, Any]]:
        if not folder.is_dir():
            raise RequestError(
                f"run.output: {path} is not on storage that rank {this_rank()} shares with "
                "rank 0; choose a folder that all machines of the run have"
            )
        records = {}
        with explain_full_disk(path):
            for number, pieces in enumerate(groups):
                more = f"-{number}" if number else ""
                part = folder / f"part-{this_rank()}{more}.safetensors"
                found, records[part.name] = write_pieces(part, pieces if more else pieces | random)
                index.update(found)
        return records

    records = {name: record for each in on_every_rank(write) for name, record in each.items()}
    indexes: list[Any] = [index] * world_size()
    if world_size() > 1:
        dist.gather_object(index, indexes if this_rank() == 0 else None)
    return records, indexes


def keep_newest(run: RunFolder, count: int) -> None:
    """Remove all but the newest `count` complete checkpoints. All ranks call this."""

    def remove() -> None:
        for step in run.steps()[:-count]:
            remove_folder(run.checkpoint(step))

    on_first_rank(remove)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose hashes were checked."""

    path: Path
    format: int
    position: Position
    layout: Layout
    config: dict[str, Any]
    data: dict[str, str]
    values: dict[str, Any]  # the engine's
    ranks: int  # that wrote it

    def reader(self) -> Reader:
        """Its tensors: `model/NAME`, `optimizer/NAME/KEY`, `master/NAME` where the model is in
        half precision, and `random/RANK/cpu` (and `cuda`)."""
        if self.format == FORMAT:
            return PieceReader(self.path)
        index = index_file(self.path / TENSORS_1)
        first = {f"random/0/{kind}": f"random/{kind}" for kind in ("cpu", "cuda")}
        index |= {new: index.pop(old) for new, old in first.items() if old in index}
        return PieceReader(self.path, index)

    def restore(self, engine: Stateful) -> None:
        """Engine and random state as they were; on another number of ranks, each rank's random
        state follows from the run's seed, the step and the rank."""
        reader = self.reader()
        if self.ranks == world_size():
            _set_random(reader)
        else:
            key = f"{self.config['run']['seed']}/{self.position.step}/{this_rank()}"
            torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
        engine.load_state(reader, self.values)


def open_checkpoint(path: Path) -> Checkpoint:
    """All ranks call this; rank 0 reads and hashes.

    Raises RequestError when the checkpoint is not complete, or a hash is not right.
    """

    def check() -> tuple[int, dict[str, Any]]:
        manifest = read_manifest(path)
        if manifest is None:
            raise RequestError(f"{path}: not a complete checkpoint (it has no manifest)")
        if manifest.get("format") not in (1, FORMAT):
            raise RequestError(
                f"{path}: written in format {manifest.get('format')}, this version reads "
                f"1 to {FORMAT}"
            )
        if broken := broken_files(path, manifest):
            raise RequestError(f"{path}: damaged: {', '.join(broken)} is not what was written")
        return manifest["format"], json.loads((path / STATE).read_text())

    written, state = on_first_rank(check)
    return Checkpoint(
        path=path,
        format=written,
        position=Position(**state["position"]),
        layout=Layout.from_dict(state["layout"]),
        config=state["config"],
        data=state["data"],
        values=state["engine"],
        ranks=state.get("ranks", 1),
    )


def newest_checkpoint(run: RunFolder) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest checkpoint that is whole; newer ones with what was found wrong with them.
    All ranks call this."""
    problems: list[tuple[Path, str]] = []
    for step in reversed(on_first_rank(run.steps)):
        path = run.checkpoint(step)
        try:
            return open_checkpoint(path), problems
        except RequestError as error:
            problems.append((path, str(error)))
    return None, problems


def _random() -> dict[str, Piece]:
    """The states of this rank's random generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        f"random/{this_rank()}/{kind}": Piece(state, tuple(state.shape), (0,))
        for kind, state in states.items()
    }


def _set_random(reader: Reader) -> None:
    names, known = f"random/{this_rank()}/", set(reader.names())
    for kind, put in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if names + kind in known and (kind == "cpu" or torch.cuda.is_available()):
            put(reader.read(names + kind, (0,), reader.shape(names + kind)))
