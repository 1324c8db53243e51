"""A plan in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rostra.plan.explain import Explanation
from rostra.plan.planner import Plan
from rostra.plan.results import KINDS, OUTSIDE, Candidate
from rostra.plan.verdict import Verdict, Way
from rostra.plan.words import TOLD, counts, elsewhere, headline, kinds_of, rows_of, words

BAR = 48  # characters for all of a device's memory
BARS = 4  # layouts whose memory is drawn
MISSES = 6  # strategies that do not fit, told by name
COLOURS = {
    "parameters": "blue", "quantization": "cyan", "gradients": "green", "optimizer": "yellow",
    "activations": "red", "logits": "magenta", "gathered": "bright_blue",
    "communication": "bright_green", "reserved": "white", "loading": "bright_magenta",
    "saving": "bright_yellow",
}  # fmt: skip
# In a place without colours, a letter of the kind fills its part of the bar.
LETTERS = {
    "parameters": "P", "quantization": "Q", "gradients": "G", "optimizer": "O",
    "activations": "A", "logits": "L", "gathered": "g", "communication": "c", "reserved": "r",
    "loading": "l", "saving": "s",
}  # fmt: skip


def show(told: Explanation) -> None:
    """Print a plan on standard output."""
    plan, console = told.plan, Console(highlight=False)
    parts: list[Any] = [_head(plan)]
    if plan.chosen is None:
        parts.append(_ways(told.ways))
    else:
        shown = [plan.chosen, *plan.alternatives]
        parts += [
            Text("\n".join(told.config), style="bold"),
            _layouts(plan, shown),
            _bars(plan, shown[:BARS], console),
            _effects(told),
        ]
        if misses := [x for x in told.why_not if x.candidate is None]:
            parts.append(_misses(misses))
        parts.append(Text(f"{counts(plan)}.", style="dim"))
    for part in parts:
        console.print(part, "", sep="\n")


def _head(plan: Plan) -> Group:
    title, *lines = headline(plan)
    told = [Text(title, style="bold"), *map(Text, lines)]
    if plan.notes:
        told.append(Text(f"assumed: {'; '.join(plan.notes)}", style="dim"))
    return Group(*told)


def _layouts(plan: Plan, shown: Sequence[Candidate]) -> Group:
    """Each layout in words, above a line of its figures."""
    rows = rows_of(plan, shown)
    names = [name for name in rows[0] if name != "layout"]
    widths = {name: max(len(x) for x in (name, *(row[name] for row in rows))) for name in names}
    lines: list[Any] = [Text("   " + _aligned({n: n for n in names}, widths), style="bold")]
    for number, row in enumerate(rows, 1):
        style = "bold" if number == 1 else ""
        lines.append(_hung(f"{number}  ", Text(row["layout"], style=style)))
        lines.append(Text("   " + _aligned(row, widths), style=style))
    return Group(*lines)


def _aligned(row: dict[str, str], widths: dict[str, int]) -> str:
    return "  ".join(row[name].rjust(width) for name, width in widths.items())


def _hung(mark: str, text: Text) -> Table:
    """Text beside a mark, under which nothing stands when it takes several lines."""
    table = Table.grid()
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row(mark, text)
    return table


def _bars(plan: Plan, shown: Sequence[Candidate], console: Console) -> Group:
    """Memory by kind, stacked, over the memory of a device; then the first's in figures."""
    colours = console.color_system is not None
    room = plan.cluster.device.memory_bytes
    lines: list[Any] = [Text("memory of a device", style="bold")]
    for number, candidate in enumerate(shown, 1):
        line = Text(f"{number}  ")
        drawn = widths(candidate, room, BAR)
        for kind, width in drawn.items():
            line.append(("█" if colours else LETTERS[kind]) * width, style=COLOURS[kind])
        line.append("·" * max(0, BAR - sum(drawn.values())) + "|", style="dim")
        line.append(f" {decimal(candidate.memory.peak)} of {decimal(room)}")
        lines.append(line)
    legend = []
    for kind in kinds_of(shown):
        size = shown[0].memory.peak_kinds.get(kind, 0)
        told = decimal(size) if size >= TOLD else "(not in 1)"
        mark = ("█" if colours else LETTERS[kind], COLOURS[kind])
        legend.append(Text.assemble(mark, f" {kind} {told}"))
    lines.append(Padding(Columns(legend, padding=(0, 3, 0, 0)), (0, 0, 0, 3)))
    for number, candidate in enumerate(shown, 1):
        if more := elsewhere(candidate):
            lines.append(Text(f"   {number} also needs {more} a device"))
    return Group(*lines)


def widths(candidate: Candidate, room: int, total: int) -> dict[str, int]:
    """Characters for each kind of memory, of `total` for all of `room`, rounded at their ends."""
    found, so_far, drawn = {}, 0, 0
    for kind in (*KINDS, *OUTSIDE):
        so_far += candidate.memory.peak_kinds.get(kind, 0)
        end = round(total * so_far / room)
        found[kind], drawn = end - drawn, end
    return found


def _effects(told: Explanation) -> Table:
    assert told.plan.chosen is not None
    rows = [x.in_words(told.plan.chosen.time.step) for x in told.effects]
    table = _table(("against the first", "memory", "step", ""), right=("memory", "step"))
    for row in rows:
        table.add_row(*map(Text, (row["technique"], row["memory"], row["time"], row["remark"])))
    return table


def _misses(misses: Iterable[Verdict]) -> Table:
    """The plainest first: what one would have thought of."""
    table = _table(("does not fit", "short of, at the least"))
    for x in sorted(misses, key=lambda x: x.parts)[:MISSES]:
        table.add_row(Text(x.strategy), Text(decimal(x.shortage)))
    return table


def _ways(ways: Sequence[Way]) -> Group | Text:
    if not ways:
        return Text("No one or two changes make it fit.")
    lines: list[Any] = [Text("what would make it fit", style="bold")]
    for way in ways:
        layout, memory = way.candidate.layout, way.candidate.memory
        lines.append(_hung("-  ", Text(way.how)))
        lines.append(_hung("   ", Text(f"{decimal(memory.peak)}: {words(layout)}", style="dim")))
    return Group(*lines)


def _table(names: Iterable[str], right: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, header_style="bold", justify="right" if name in right else "left")
    return table
