"""The table `data.clean`: which documents are kept, and what is put right in them."""

from __future__ import annotations

from rostra.config.base import Section


class CleanTable(Section):
    """Which documents are kept, and what is put right in them."""
