"""One process against layouts: the shrunk work, the runs, and the verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rostra.build import build_engine
from rostra.config import Config
from rostra.errors import RequestError, TrainingFailed
from rostra.layout import Layout
from rostra.verify.compare import EXACT, Distance, Reference, allowed
from rostra.verify.layouts import OWN
from rostra.verify.steps import Build, Found, Work, made, run_steps
from rostra.verify.work import (
    Checked,
    asked_layouts,
    checkable,
    precise,
    small,
    whole_shape,
    work_of,
)
from rostra.workers.pool import Pool, RankFailed

SAMPLES = 8  # of a global batch, at the least
MOST_RANKS = 4  # that are started when nobody says how many
HANGS = 600.0  # seconds; DeepSpeed may compile in them


@dataclass
class Verification:
    """What `verify` found; `asked` tells whether the layouts were named by the user."""

    steps: int
    compute: str
    tolerance: Distance
    layouts: list[Checked]
    asked: bool

    @property
    def agree(self) -> bool:
        verdicts = [each.agrees for each in self.layouts]
        return True in verdicts and False not in verdicts

    def to_dict(self) -> dict[str, Any]:
        return {
            "agree": self.agree,
            "steps": self.steps,
            "compute": self.compute,
            "tolerance": self.tolerance.to_dict(),
            "layouts": [each.to_dict() for each in self.layouts],
        }

    def check(self) -> None:
        """Raises TrainingFailed, naming the worst layout, when one does not agree; and
        RequestError when one that was asked for is refused, or none could be run."""
        if wrong := [each for each in self.layouts if each.agrees is False]:
            raise TrainingFailed(self._complaint(wrong))
        refused = [each for each in self.layouts if each.agrees is None]
        own = [each for each in refused if each.asked.name.startswith(OWN)]
        if refused and (self.asked or own or len(refused) == len(self.layouts)):
            first = (own or refused)[0]
            raise RequestError(f"layout {first.asked.name}: {first.reason}")

    def _complaint(self, wrong: Sequence[Checked]) -> str:
        ran = sum(case.agrees is not None for case in self.layouts)
        begin = f"{len(wrong)} of {ran} layouts do not agree with one process"
        if crashed := next((case for case in wrong if case.distance is None), None):
            return f"{begin}; {crashed.asked.name} failed: {crashed.reason}"
        worst = max(wrong, key=lambda case: case.excess(self.tolerance))
        assert worst.distance is not None
        found = worst.distance.worst(self.tolerance)
        return (
            f"{begin}; the worst is {worst.asked.name}: its {found.what} differs by "
            f"{found.value:.1e}, and {found.allowed:.1e} is allowed"
        )


def verify(
    config: Config,
    layouts: Mapping[str, dict[str, Any]] | None = None,
    *,
    steps: int = 10,
    workers: int | None = None,
    precision: str = "fp32",
    build: Build = build_engine,
    pool: Pool | None = None,
    notice: Callable[[str], None] = print,
) -> Verification:
    """Run the config's model, shrunk, for some steps in one process and under `layouts` (by
    name, with keys of `parallel`; without, the config's own and those of `NAMED`), on the CPU,
    with at most `workers` ranks.

    `precision` is one that `precision.compute` may be, or "config" for the config's own. `build`
    makes engines, on every rank. Raises RequestError for a config or layout that does not exist,
    TrainingFailed when one process itself gives a loss that is not finite.
    """
    config = precise(config, precision)
    full, most = whole_shape(config), workers or MOST_RANKS
    samples = max(SAMPLES, 2 * most)
    asked = asked_layouts(config, layouts, most)
    cases = [checkable(each, full, most, samples, config) for each in asked]
    result = Verification(steps, str(config.precision.compute), EXACT, cases, layouts is not None)
    if any(case.layout is not None for case in cases):
        work = work_of(config, full, cases, samples, steps, build)
        with contextlib.ExitStack() as closing:
            ranks = pool or closing.enter_context(Pool(HANGS, quiet=True))
            ranks.grow(max((case.asked.ranks for case in cases if case.grouped), default=0))
            notice("one process")
            reference, result.tolerance = _one_process(small(config, work), work)
            for case in cases:
                if case.layout is not None:
                    notice(f"{case.asked.name}: {case.layout.describe()}")
                    _run(case, case.layout, work, ranks, reference, result.tolerance)
    return result


def _one_process(config: Config, work: Work) -> tuple[Reference, Distance]:
    """What one process computes with all samples at once and nothing saved or offloaded, and
    what a layout may differ from it by."""
    states, compute = config.memory.optimizer_states, config.precision.compute
    assert compute != "auto"

    def run(micro: int, order: Sequence[int]) -> Found:
        layout = Layout(
            micro,
            -(-work.samples // micro),
            compute=compute,
            quantization=config.quantization.kind,
            adapter=config.adapter.kind,
            optimizer_states=states,
        )
        return run_steps(config.model_copy(update={"parallel": "auto"}), layout, work, order)

    samples = list(range(work.samples))
    names = [name for name, _ in made(config, work)[0].named_parameters()]
    reference = Reference.of(run(work.samples, samples), names)
    if not reference.finite:
        raise TrainingFailed(
            "one process itself gives a loss or gradient that is not finite; lower "
            "optimizer.learning_rate"
        )
    orders = ((1, samples[::-1]), (3, samples[::2] + samples[1::2]))
    spreads = [reference.distance([run(micro, order)]) for micro, order in orders]
    # PyTorch's Muon orthogonalises in bfloat16, whatever else is computed in.
    exact = compute == states == "fp32" and config.optimizer.name != "muon"
    return reference, allowed(spreads, exact)


def _run(
    case: Checked, layout: Layout, work: Work, pool: Pool, reference: Reference, tolerance: Distance
) -> None:
    """Fill in how the layout did."""
    arguments = (small(case.asked.config, work), layout, work)
    try:
        if case.grouped:
            ranks = pool.run(case.asked.ranks, run_steps, *arguments)
        else:
            ranks = [run_steps(*arguments)]
    except RequestError as error:  # what only a model that is built can tell
        case.reason = str(error)
        return
    except RankFailed as error:
        case.reason, case.agrees = str(error).strip().splitlines()[-1], False
        return
    case.distance = reference.distance(ranks)
    case.memory_bytes = max(rank.memory_bytes for rank in ranks)
    case.agrees = case.distance.within(tolerance)
    if not case.agrees:
        found = case.distance.worst(tolerance)
        case.reason = f"{found.what} beyond {found.allowed:.1e}"
