"""What each started rank runs: `python -m rostra.workers.rank PARENT MODULE ARGUMENTS`.

It prepares the process before PyTorch is loaded, then runs MODULE as `python -m` would.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

from rostra.errors import Stopped
from rostra.workers.fate import FAILED, LAUNCHER, STOPPED, note
from rostra.workers.group import cores

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with(parent: int) -> None:
    """Let this process be killed when `parent`, which started it, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before the request
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def watch(parent: int, seconds: float = 1.0) -> None:
    """Kill this process once it has another parent: the way where the kernel offers none."""
    while os.getppid() == parent:
        time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    end_with(int(parent))
    # Until training takes over, a stop ends this process at once and says nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ[LAUNCHER] = "rostra"
    share = max(1, cores() // int(os.environ["LOCAL_WORLD_SIZE"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code == Stopped.exit_code:  # the agent would kill those that still save
            note(STOPPED, Stopped.exit_code)
            sys.exit(0)
        if end.code not in {None, 0}:
            note(FAILED, end.code if isinstance(end.code, int) else 1)
        raise
    except BaseException:
        note(FAILED, 1)
        raise


if __name__ == "__main__":
    main()
