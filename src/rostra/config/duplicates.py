"""The table `data.duplicates`: documents that say the same, and those of evaluation sets."""

from __future__ import annotations

from rostra.config.base import Section


class DuplicatesTable(Section):
    """Documents that say the same, and those of evaluation sets."""
