"""The table `data.prepare`: what does the work of preparing, and what shards are like."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rostra.config.base import Count, Section


class PrepareTable(Section):
    """How documents become shards."""

    engine: Literal["process"] = "process"
    shard_tokens: Count = Field(16_777_216, description="tokens after which a shard is closed")
