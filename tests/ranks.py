"""Ranks for tests: one pool of processes for the whole session, see the fixture `ranks`."""

from rostra.workers.pool import Pool as Ranks
from rostra.workers.pool import RankFailed

__all__ = ["RankFailed", "Ranks"]
