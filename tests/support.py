"""What tests share beside fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"  # not there for everybody


def need(found: object, what: str) -> None:
    """Skip when something is not installed; fail where ROSTRA_TEST_ALL says all must run."""
    if found:
        return
    if os.environ.get("ROSTRA_TEST_ALL"):
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed")
