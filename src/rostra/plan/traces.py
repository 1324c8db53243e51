"""The traces that a plan makes: what it would take is run without memory before it is taken."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from rostra.hardware import Cluster
from rostra.layout import Layout
from rostra.plan.job import Job
from rostra.plan.results import Memory
from rostra.plan.scaled import ScaledMemory
from rostra.plan.search import Entry, Miss, Room

When = Literal["always", "in doubt"]
MOST = 8  # traces of a plan
TIGHT = 0.5  # share of a device from which on formulas are in doubt

PROGRAM = "from rostra.plan.traces import answer; answer()"


@dataclass
class Traces:
    """What traces found out, of at most `MOST`.

    `in doubt` traces a layout only where that may change a choice: where it takes more than
    half of a device, or where a family that no formula knows has layouts that do not fit.
    """

    when: When = "always"
    made: int = 0
    failed: dict[tuple[Any, ...], str] = field(default_factory=dict)  # by strategy: why

    @property
    def left(self) -> int:
        return MOST - self.made

    def to_dict(self) -> dict[str, Any]:
        return {"made": self.made, "most": MOST, "failed": list(self.failed.values())}

    def why_not(self, layout: Layout) -> str | None:
        """Why layouts of this strategy cannot be traced, if one failed."""
        return self.failed.get(_kind(layout))

    def wanted(self, entry: Entry | Miss, memory: ScaledMemory, room: Room, all_fit: bool) -> bool:
        """Whether a trace of it is worth its seconds."""
        tight = entry.peak > TIGHT * room.device
        return self.when == "always" or tight or not (memory.known or all_fit)

    def possible(self, entry: Entry | Miss, memory: ScaledMemory) -> bool:
        """Whether a trace can tell something of it, and none of its kind has failed. Where
        formulas know the family, a twin tells nothing."""
        if memory.hides(entry.layout):
            return False
        own = memory.twin(entry.layout) == entry.layout
        return (own or not memory.known) and self.why_not(entry.layout) is None

    def refutes(
        self, entry: Entry | Miss, job: Job, cluster: Cluster, memory: ScaledMemory, room: Room
    ) -> bool | None:
        """Trace it: whether there is no room for it, which `memory` then knows, and of a family
        that no formula knows more than that. None where the trace failed."""
        self.made += 1
        layout = memory.twin(entry.layout)
        try:
            with _silence():
                found = _run(job, layout, cluster)
        except Exception as error:  # whatever an engine needs that is not here
            self.failed[_kind(layout)] = _why(error)
            return None
        refuted = room.shortage(memory.keep(layout, found), layout.world_size) > 0
        if refuted or not memory.known:
            memory.scale(layout)
        return refuted


def _kind(x: Layout) -> tuple[Any, ...]:
    """What decides whether a trace can be made."""
    whole = x.sharding in ("no_shard", "zero1")  # each rank has its part of the model as it is
    split = x.pipeline > 1, x.tensor > 1, x.context > 1
    return x.engine, whole, split, x.compute, x.adapter, x.quantization


@contextmanager
def _silence() -> Iterator[None]:
    """Inside nothing is logged: of what fails torch's loggers tell hundreds of lines, and the
    plan one."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _why(error: BaseException) -> str:
    """The first line of what was at the bottom of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _run(job: Job, layout: Layout, cluster: Cluster) -> Memory:
    from rostra.plan.trace import traced  # the engine comes with it, which no search needs

    run: Callable[[Job, Layout, Cluster], Memory] = _apart if dist.is_initialized() else traced
    return run(job, layout, cluster)


def _apart(job: Job, layout: Layout, cluster: Cluster) -> Memory:
    """The trace in a process of its own: a rank of a group can stand for no other one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=pickle.dumps((job, layout, cluster)),
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    lines = done.stdout.decode().splitlines()
    told = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
    if "kinds" not in told:
        raise RuntimeError(told.get("failed") or f"its process ended with {done.returncode}")
    return Memory(**told)


def answer() -> None:
    """What that process does: trace what standard input has, and print the memory as JSON."""
    job, layout, cluster = pickle.load(sys.stdin.buffer)
    try:
        told = asdict(_run(job, layout, cluster))
    except Exception as error:
        told = {"failed": _why(error)}
    print(json.dumps(told))
