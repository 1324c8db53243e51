"""The table `data.load`: the order of samples, and how shards come to the ranks."""

from __future__ import annotations

from rostra.config.base import Section


class LoadTable(Section):
    """The order of samples, and how shards come to the ranks."""
