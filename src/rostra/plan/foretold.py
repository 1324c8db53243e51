"""What the plan foretold of a run, beside what the run then measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from rich.filesize import decimal

from rostra.events import Event, Events
from rostra.plan.results import Candidate

APART = 0.1  # share of the planned value by which a measured one is reported
_STEPS = 5  # whose median counts, after the first, which warms up, and the second, watched


@dataclass
class Foretold:
    """Listens to a run: emits `plan` when it has started, and `plan_checked` once memory and
    `_STEPS` steps were measured, or the run has ended; says where they part, and what to do.

    `calibrated` is whether the plan rests on what was measured of this machine.
    """

    candidate: Candidate
    events: Events
    calibrated: bool
    _memory: int | None = None
    _seconds: list[float] = field(default_factory=list)
    _last: int = 0  # step of the run
    _first: int = 0  # step of this process
    _checked: bool = False

    def __call__(self, event: Event) -> None:
        match event.kind:
            case "started":
                self._first, self._last = event["step"] + 1, event["steps"]
                self._tell()
            case "memory":
                self._memory = event["bytes"].get("total")
            case "step" if not self._checked:
                if event["step"] > self._first + 1:
                    self._seconds.append(event["seconds"])
                if len(self._seconds) == _STEPS or event["step"] == self._last:
                    self._checked = True
                    self._check(event["step"])

    def _tell(self) -> None:
        found = self.candidate.to_dict()
        self.events.emit(
            "plan",
            calibrated=self.calibrated,
            **{
                key: found[key]
                for key in (
                    "memory_bytes", "live_memory_bytes", "step_seconds", "seconds",
                    "tokens_per_second", "mfu",
                )
            },
        )  # fmt: skip

    def _check(self, step: int) -> None:
        plan, seconds = self.candidate, median(self._seconds) if self._seconds else None
        memory, step_seconds = plan.memory.live, plan.time.step
        tokens = plan.tokens_per_second * step_seconds
        self.events.emit(
            "plan_checked",
            step=step,
            planned={
                "memory_bytes": memory,
                "step_seconds": step_seconds,
                "tokens_per_second": plan.tokens_per_second,
            },
            measured={
                "memory_bytes": self._memory,
                "step_seconds": seconds,
                "tokens_per_second": tokens / seconds if seconds else None,
            },
        )
        if off := parted(memory, self._memory):
            self.events.notice(
                f"a step holds {decimal(self._memory or 0)} of tensors, {off} than the planned "
                f"{decimal(memory)}: plans of this model are that uncertain; leave as much of the "
                "device free, with a smaller train.micro_batch_size"
            )
        if off := parted(step_seconds, seconds):
            self.events.notice(
                f"a step takes {seconds:.3g} s, {off} than the planned {step_seconds:.3g} s: "
                f"{_remedy(self.calibrated)}"
            )


def parted(planned: float, measured: float | None) -> str | None:
    """How much more or less was measured, in words; None up to `APART`, or when nothing was."""
    if measured is None or planned <= 0 or abs(measured / planned - 1) <= APART:
        return None
    share = measured / planned - 1
    return f"{abs(share):.0%} {'more' if share > 0 else 'less'}"


def _remedy(calibrated: bool) -> str:
    if calibrated:
        return (
            "something else may use this machine, or did while it was calibrated; "
            "`rostra calibrate` measures it again"
        )
    return "plans go by typical figures until `rostra calibrate` has measured this machine"
