"""A run's own local ranks, started and watched by PyTorch's elastic agent."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from rostra.errors import RequestError, Stopped, TrainingFailed
from rostra.workers.fate import any_stopped, noted

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

_STOPS = (signal.SIGTERM, signal.SIGINT)
_LINES = 30  # of a failed rank's output are shown


def start(arguments: Sequence[str], count: int, module: str = "rostra.cli") -> int:
    """Run `python -m MODULE ARGUMENTS` as `count` ranks on this machine; the run's exit code.

    It is 0; or that of the rank which failed first by itself (4 when a signal killed it), after
    which the others are ended; or 75 when the ranks stopped on request. Rank 0 has this
    process's own output, terminal and all; of the others only the last lines are shown, when
    one fails. SIGTERM and SIGINT are passed on to the ranks, which have all the time they need
    to save; a second SIGINT is passed on too, and a third kills them. Ranks do not outlive
    this process. MODULE is looked for where packages are installed, not in the current folder.
    Raises RequestError when `count` is not positive.
    """
    if count < 1:
        raise RequestError(f"{count} ranks cannot be started; ask for 1 at the least")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    kept = [argument.replace("$", "$$") for argument in arguments]  # the agent has templates
    command = ["-P", "-m", "rostra.workers.rank", str(os.getpid()), module, *kept]
    with (
        tempfile.TemporaryDirectory(prefix="rostra-ranks-") as logs,
        _quiet_agent(),
        _PassedOn() as stops,
    ):
        try:
            elastic_launch(_config(count, logs), sys.executable)(*command)
        except SignalException:  # before there were ranks
            return Stopped.exit_code
        except ChildFailedError as error:
            ends = [_End.of(rank, error.failures[rank], Path(logs)) for rank in error.failures]
            first = min(ends, key=lambda end: (end.told, end.when))
            if stops.received and first.told:
                return Stopped.exit_code
            _explain(first, ends, count)
            return first.code if first.code > 0 else TrainingFailed.exit_code
        return Stopped.exit_code if any_stopped(Path(logs)) else 0


def _config(count: int, logs: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="rostra",
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(logs, dict.fromkeys(range(1, count), Std.ALL)),
        # The agent kills 30 seconds after a signal; SIGTERM and SIGINT are passed on here.
        signals_to_handle="SIGQUIT",
    )


class _PassedOn:
    """Inside, SIGTERM (once) and SIGINT go to the ranks, and the agent waits for their end."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> _PassedOn:
        self._others = set(psutil.Process().children())
        here = threading.current_thread() is threading.main_thread()  # only it may handle them
        numbers = (*_STOPS, signal.SIGQUIT) if here else ()
        self._before = {number: signal.getsignal(number) for number in numbers}
        for number in _STOPS if here else ():
            signal.signal(number, self._pass_on)
        return self

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        self.received.append(number)
        times = self.received.count(number)
        ranks = set(psutil.Process().children()) - self._others
        if not ranks:
            raise SignalException("stopped before the start", signal.Signals(number))
        if times > 1 and number == signal.SIGTERM:  # a scheduler may repeat itself
            return
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL if times > 2 else number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not Python's


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """What the agent logs about ends of ranks is said here, in Rostra's words."""
    names = [name for name in logging.root.manager.loggerDict if "distributed.elastic" in name]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@dataclass(frozen=True)
class _End:
    """How a rank ended that did not end well; `code` is negative for a signal."""

    rank: int
    process: int
    code: int
    when: float  # seconds since 1970
    folder: Path  # with its output

    @classmethod
    def of(cls, rank: int, failure: ProcessFailure, logs: Path) -> _End:
        """Ranks note when they fail; one that a signal killed could not, and the agent saw it
        up to a second after others had felt it. Where the agent itself kills, it does so 30
        seconds later."""
        folder = next(logs.glob(f"*/attempt_0/{rank}"))
        when, code = noted(folder) or (failure.timestamp - 10.0, failure.exitcode)
        # Its code counts, unless it was ended while it was about to leave.
        code = failure.exitcode if failure.exitcode > 0 else code
        return cls(rank, failure.pid, code, when, folder)

    @property
    def told(self) -> bool:
        """Whether it was ended from outside: by the agent, or by the signal that was passed on."""
        return -self.code in _STOPS


def _explain(first: _End, ends: Sequence[_End], count: int) -> None:
    """Say on standard error why the run failed, unless rank 0 has."""
    if first.code < 0:
        name = signal.Signals(-first.code).name
        hint = ": memory may have run out" if name == "SIGKILL" else ""
        _say(f"rank {first.rank} of {count} (process {first.process}) was killed by {name}{hint}")
    # A code above 1 comes with a message of Rostra's, the same on all ranks that end with it.
    elif first.code > 1 and any(end.rank == 0 and end.code == first.code for end in ends):
        return
    elif first.rank > 0:
        _say(f"rank {first.rank} of {count} failed with exit code {first.code}")
    for name in ("stdout.log", "stderr.log"):  # of rank 0 there are none
        file = first.folder / name
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        if lines:
            shown = "\n".join(lines[-_LINES:])
            print(f"--- end of {name} of rank {first.rank}\n{shown}", file=sys.stderr)


def _say(message: str) -> None:
    print(f"rostra: {message}", file=sys.stderr)
