"""What `verify` found, for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rostra.verify.check import Verification
from rostra.verify.work import Checked

VERDICTS = {True: "agrees", False: "differs", None: "refused"}


def show(found: Verification) -> None:
    """Print the table of layouts on standard output, and why some did not agree or run."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("layout", overflow="fold", min_width=20)
    for name in ("ranks", "loss", "gradient", "parameters", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for case in found.layouts:
        table.add_row(*map(Text, _row(case)))
    console = Console(highlight=False)
    console.print(table)
    for case in found.layouts:
        if case.reason:
            console.print(Text(f"\n{case.asked.name} {VERDICTS[case.agrees]}: {case.reason}"))
    allowed = found.tolerance
    console.print(
        f"\nLargest differences from one process over {found.steps} steps in {found.compute}, "
        f"without dropout; allowed are {allowed.loss:.1e} in the loss, {allowed.gradient:.1e} of "
        f"the gradient norm, {allowed.parameter:.1e} in a parameter. Memory: the fullest rank's."
    )


def _row(case: Checked) -> list[str]:
    line = "" if case.layout is None else case.layout.describe()
    name = case.asked.name
    shown = f"{name}: {line}" if line and line != name else name
    numbers = ["", "", ""]
    if (apart := case.distance) is not None:
        numbers = [f"{x:.1e}" for x in (apart.loss, apart.gradient, apart.parameter)]
    memory = "" if case.memory_bytes is None else f"{case.memory_bytes / 1e6:.2f} MB"
    return [shown, str(case.asked.ranks), *numbers, memory, VERDICTS[case.agrees]]
