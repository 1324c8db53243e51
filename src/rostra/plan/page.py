"""A plan as a page that needs no other file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from rich.filesize import decimal

from rostra.errors import RequestError
from rostra.plan.choice import about_beats
from rostra.plan.explain import Explanation
from rostra.plan.planner import Plan
from rostra.plan.results import Candidate
from rostra.plan.shortage import shortage_told
from rostra.plan.words import counts, elsewhere, headline, kinds_of, rows_of, words

TRADES = 12  # rows
VERDICTS = 12  # rows that are seen before the rest is asked for


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
    environment.filters.update(bytes=decimal, words=words)
    template = Path(__file__).with_name("plan.html").read_text(encoding="utf-8")
    plan, chosen = told.plan, told.plan.chosen
    shown = [] if chosen is None else [chosen, *plan.alternatives]
    rows = rows_of(plan, shown)
    text = environment.from_string(template).render(
        plan=plan,
        headline=headline(plan),
        config="\n".join(told.config),
        shortage=None if plan.feasible else shortage_told(plan),
        counts=counts(plan) if plan.feasible else "",
        rows=rows,
        bars=[
            _bar(x, row["layout"], plan.cluster.device.memory_bytes)
            for x, row in zip(shown, rows, strict=True)
        ],
        kinds=kinds_of(shown),
        front=rows_of(plan, _trades(plan)),
        effects=[] if chosen is None else [x.in_words(chosen.time.step) for x in told.effects],
        why_not=(told.why_not[:VERDICTS], told.why_not[VERDICTS:]),
        ways=told.ways,
    )
    return text + "\n"


def _trades(plan: Plan) -> list[Candidate]:
    """Of the front what differs by more than the models err, evenly thinned to some."""
    kept: list[Candidate] = []
    for x in plan.front:
        if not any(about_beats(_values(other), _values(x)) for other in kept):
            kept.append(x)
    if len(kept) <= TRADES:
        return kept
    return [kept[round(i * (len(kept) - 1) / (TRADES - 1))] for i in range(TRADES)]


def _values(x: Candidate) -> tuple[float, int, int]:
    return x.time.step, x.layout.world_size, x.memory.peak


def _bar(x: Candidate, name: str, room: int) -> dict[str, Any]:
    """A stacked bar over the memory of a device: parts with their share of it in per cent."""
    sizes = {kind: x.memory.peak_kinds[kind] for kind in kinds_of([x])}
    parts = [{"kind": k, "bytes": n, "share": 100 * n / room} for k, n in sizes.items()]
    told = ", ".join(f"{kind} {decimal(size)}" for kind, size in sizes.items())
    return {
        "layout": name,
        "parts": parts,
        "told": told,
        "peak": x.memory.peak,
        "elsewhere": elsewhere(x),
    }
