"""Cleaning: which documents are kept, and what is put right in them (`data.clean`)."""

from __future__ import annotations

from rostra.data.clean.cleaner import Cleaner
from rostra.data.clean.page import Rejection
from rostra.data.clean.rejections import Rejected, Rejections

__all__ = ["Cleaner", "Rejected", "Rejection", "Rejections"]
