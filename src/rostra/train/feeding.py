"""What a run is fed with: its prepared data, the loader of its samples, and what was seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rostra.adapt import virtual_tokens
from rostra.checkpoint import Checkpoint, Position
from rostra.config import Config
from rostra.data import (
    Loader,
    Prepared,
    ReadAhead,
    Source,
    Stream,
    StreamLoader,
    prepare,
    streaming_loader,
    training_loader,
)
from rostra.errors import RequestError
from rostra.events import Events
from rostra.train.choose import full_rows
from rostra.workers import on_every_rank, on_first_rank, world_size


def prepare_data(config: Config, events: Events) -> Prepared:
    """The data; written by rank 0 alone when it is not there yet.

    Raises:
        RequestError: when it cannot be prepared, or is not the same on all ranks.
    """

    def prepared() -> Prepared:
        return prepare(config.data, config.model.pretrained, events.notice)

    found: list[Prepared] = []

    def mine() -> dict[str, str]:
        found.append(prepared())
        return found[0].identity

    on_first_rank(lambda: prepared() and None)
    same = on_every_rank(mine)
    if odd := [rank for rank, identity in enumerate(same) if identity != same[0]]:
        raise RequestError(
            f"data.sources: rank {odd[0]} reads other documents than rank 0; give all "
            "machines the same files, or one data.cache that they share"
        )
    return found[0]


def make_loader(
    config: Config, prepared: Prepared, checkpoint: Checkpoint | None, events: Events
) -> ReadAhead:
    """The loader, reading ahead, and going on as a checkpoint says.

    Raises:
        RequestError: when there is nothing to train on, or sources do not go on like this.
    """
    made = _streaming_loader if config.data.streaming else _loader
    load = config.data.load
    loader = made(config, prepared, checkpoint, events)
    return ReadAhead(loader, load.read_ahead, load.workers, events.notice)


def _loader(
    config: Config, prepared: Prepared, checkpoint: Checkpoint | None, events: Events
) -> Loader:
    def made(notice: Callable[[str], None]) -> Loader:
        return training_loader(
            prepared,
            config.data,
            config.run.seed,
            config.train.global_batch_size,
            full_rows(config),
            virtual_tokens(config.adapter),
            notice,
        )

    if world_size() > 1:  # rank 0 keeps the rows of packed samples, which the others read
        on_first_rank(lambda: made(lambda _: None) and None)
    loader = made(events.notice)
    if checkpoint is not None:
        loader.resume(checkpoint.position.mixture, checkpoint.position.samples)
    return loader


def _streaming_loader(
    config: Config, prepared: Prepared, checkpoint: Checkpoint | None, events: Events
) -> StreamLoader:
    size = config.train.global_batch_size
    loader = streaming_loader(prepared, config.data, config.run.seed, size, events.notice)
    if checkpoint is not None:
        here = checkpoint.position
        loader.resume(here.mixture, here.lanes, here.samples)
    return loader


def total_steps(config: Config, loader: Loader | ReadAhead) -> int:
    """Optimizer steps of the whole run; the last one of whole epochs may go beyond them."""
    train, size = config.train, config.train.global_batch_size
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return max(1, math.ceil(train.tokens / (size * loader.sample_tokens)))
    assert train.epochs is not None
    return loader.steps(train.epochs)


def with_lanes(here: Position, ahead: ReadAhead) -> Position:
    """A position with the lanes of all ranks, where sources are streamed. All ranks call it."""
    loader = ahead.loader
    if not isinstance(loader, StreamLoader):
        return here
    lanes: dict[int, Any] = {}
    for found in on_every_rank(lambda: loader.cursors(here.samples)):
        lanes.update(found)
    return replace(here, lanes=[lanes[number] for number in range(loader.global_batch_size)])


def sources_seen(config: Config, here: Position, ahead: ReadAhead) -> list[dict[str, Any]]:
    """Of mixed sources, what of each was seen; empty where nothing is mixed."""
    if here.mixture is None:
        return []
    found: Sequence[Source | Stream] = ahead.loader.sources
    each = zip(config.data.sources, found, here.mixture["seen"], strict=True)
    return [
        {
            "type": source.type,
            "weight": source.weight,
            "samples": count,
            "epochs": samples.epochs(count),
        }
        for source, samples, count in each
    ]
