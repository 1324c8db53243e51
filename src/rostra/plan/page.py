"""A plan as a page that needs no other file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from rich.filesize import decimal

from rostra.errors import RequestError
from rostra.plan.explain import Explanation, counts, effect_row, headline, in_yaml, row_of
from rostra.plan.results import KINDS, Candidate
from rostra.plan.shortage import shortage_told


def write_page(told: Explanation, path: Path) -> None:
    """Write the page to `path`. Raises RequestError when that cannot be."""
    try:
        path.write_text(page(told), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--html {path}: cannot be written: {error}") from error


def page(told: Explanation) -> str:
    """The page. Everything that comes from the request is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["bytes"] = decimal
    template = Path(__file__).with_name("plan.html").read_text(encoding="utf-8")
    plan = told.plan
    shown = [] if plan.chosen is None else [plan.chosen, *plan.alternatives]
    text = environment.from_string(template).render(
        plan=plan,
        headline=headline(plan).splitlines(),
        config="" if plan.chosen is None else "\n".join(in_yaml(plan.chosen.layout)),
        shortage=None if plan.feasible else shortage_told(plan),
        counts=counts(plan) if plan.feasible else "",
        rows=[row_of(plan, x) for x in shown],
        bars=[_bar(x, plan.cluster.device.memory_bytes) for x in shown],
        kinds=_kinds(shown),
        front=[row_of(plan, x) for x in plan.front[:30]],
        effects=[effect_row(x, plan.chosen.time.step) for x in told.effects] if plan.chosen else [],
        why_not=told.why_not,
        ways=told.ways,
    )
    return text + "\n"


def _kinds(shown: list[Candidate]) -> list[str]:
    """Those that some bar shows."""
    return [kind for kind in KINDS if any(x.memory.kinds.get(kind) for x in shown)]


def _bar(x: Candidate, room: int) -> dict[str, Any]:
    """A stacked bar over the memory of a device: parts with their share of it in per cent."""
    sizes = {kind: size for kind in KINDS if (size := x.memory.kinds.get(kind, 0))}
    parts = [{"kind": k, "bytes": n, "share": 100 * n / room} for k, n in sizes.items()]
    told = ", ".join(f"{kind} {decimal(size)}" for kind, size in sizes.items())
    return {"layout": x.layout.describe(), "parts": parts, "told": told, "peak": x.memory.peak}
