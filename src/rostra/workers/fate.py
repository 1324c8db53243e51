"""How a rank came to its end, left in files for the process that started it.

Exit codes alone do not tell which of several ranks failed first, and the elastic agent ends
all ranks as soon as one leaves with a code that is not 0.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

FAILED, STOPPED = "failed", "stopped"
LAUNCHER = "ROSTRA_LAUNCHER"  # "rostra" in the environment of ranks that Rostra started


def note(end: str, code: int) -> None:
    """Write down, the first time only, when this rank failed or stopped, and its exit code;
    nothing under other launchers."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the rank's own folder
    if file and os.environ.get(LAUNCHER) == "rostra":
        with contextlib.suppress(OSError), Path(file).with_name(end).open("x") as stream:
            stream.write(f"{time.time()!r} {code}")


def noted(folder: Path) -> tuple[float, int] | None:
    """When the rank of `folder` failed, in seconds since 1970, and its code; None if it did not."""
    try:
        when, code = (folder / FAILED).read_text().split()
        return float(when), int(code)
    except (OSError, ValueError):
        return None


def any_stopped(logs: Path) -> bool:
    """Whether a rank with its folder somewhere below `logs` stopped on request."""
    return any(logs.rglob(STOPPED))
