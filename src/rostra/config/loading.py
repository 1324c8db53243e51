"""The table `data.load`: the order of samples, and how shards come to the ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rostra.config.base import Count, Section, Whole


class LoadTable(Section):
    """The order of samples, and how shards come to the ranks."""

    shuffle: Literal["global", "window", "none"] = Field(
        "global",
        description="the order of an epoch: any sample next (global); blocks of samples in any "
        "order, shuffled within a window, so that few shards are read at a time (window); as read "
        "(none)",
    )
    window: Count = Field(65_536, description="shuffle window: samples that are shuffled together")
    read_ahead: Whole = Field(
        2, description="batches that are made before they are asked for, by each worker if any"
    )
    workers: Whole = Field(
        0, description="processes of each rank that make batches; with 0 a thread does"
    )
    cache: str | None = Field(
        None,
        description="folder for shards downloaded from a store; shards/ in ROSTRA_CACHE or "
        "~/.cache/rostra when not given",
    )
    cache_bytes: Count = Field(
        68_719_476_736, description="bound of that folder; what was used longest ago goes first"
    )
