"""A calibration for people."""

from __future__ import annotations

from rostra.plan.calibrate.figure import Figure
from rostra.plan.calibrate.values import Calibration, Share


def show_calibration(found: Calibration) -> None:
    """Print what was measured as tables, on standard output."""
    from rich.console import Console
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        made.add_column(columns[0])
        for column in columns[1:]:
            made.add_column(column, justify="right")
        return made

    console = Console()
    names = [_name(share) for share in found.shares]
    work = table("What a rank does a second", "", *names)
    for name, values in _rows(found.shares).items():
        work.add_row(name, *values)
    console.print(work, "")
    sent = table("Between ranks", "", "ranks", "seconds", "GB/s")
    for figure in found.links:
        label = f"{figure.kind}, {_bytes(figure.sizes[1])}"
        seconds = f"{figure.seconds:.2g}"
        sent.add_row(label, str(figure.sizes[0]), seconds, f"{figure.rate / 1e9:.2f}")
    console.print(sent, "")
    for figure in found.disk:
        console.print(f"disk, {figure.kind}: {figure.rate / 1e9:.2f} GB/s")
    console.print(f"measured in {found.seconds:.0f} s; median spread {found.spread:.1%}")
    if noisy := found.noisy:
        console.print(
            f"{len(noisy)} of {len(list(found.figures()))} figures were uncertain: something else "
            "may use this machine; calibrate again when it is quiet",
            style="yellow",
        )


def _name(share: Share) -> str:
    ranks = "1 rank" if share.ranks == 1 else f"{share.ranks} ranks"
    return f"{ranks} x {share.threads} thread{'s' if share.threads > 1 else ''}"


def _rows(shares: tuple[Share, ...]) -> dict[str, list[str]]:
    """What is shown of each share, by what it is."""
    rows: dict[str, list[str]] = {}
    for share in shares:
        for kind, best in share.flops.items():
            rows.setdefault(f"product, {kind}", []).append(f"{best / 1e9:,.0f} GFLOP")
            sizes = {f.sizes: f for f in share.of("product forward", kind)}
            for size in [(128, 512, 512), (2048, 512, 512), (2048, 1024, 4096)]:
                if (figure := sizes.get(size)) is not None:
                    label = f"  {size[0]} x {size[1]} x {size[2]}, {kind}"
                    rows.setdefault(label, []).append(f"{figure.rate / 1e9:,.0f} GFLOP")
        for figure in share.figures:
            name = _label(figure)
            if name is not None:
                rows.setdefault(name, []).append(_told(figure))
    return rows


def _label(figure: Figure) -> str | None:
    if figure.what.startswith("attention both") and figure.sizes[:2] in ((512, 64), (2048, 64)):
        kind = figure.what.split()[-1]
        return f"{kind} attention, {figure.kind}, {figure.sizes[0]}"
    if figure.what == "between" and figure.sizes == (2048,):
        return f"layer's rest, {figure.kind}, rows"
    if figure.what == "loss":
        return f"loss, {figure.kind}, logits"
    if figure.what == "pointwise" and figure.sizes[0] == 2**26:
        return f"{figure.kind} of {_bytes(figure.sizes[0])}"
    if figure.what == "optimizer":
        return f"{figure.kind}, numbers"
    return f"operations, {figure.kind}" if figure.what == "launch" else None


def _told(figure: Figure) -> str:
    if figure.what == "pointwise":
        return f"{figure.rate / 1e9:.1f} GB"
    if figure.what == "optimizer":
        return f"{figure.rate / 1e6:,.0f} M"
    if figure.what == "loss":
        return f"{figure.rate / 1e6:,.0f} M"
    if figure.what in ("launch", "between"):
        return f"{figure.rate / 1e3:,.0f} k"
    return f"{figure.rate / 1e9:,.0f} GFLOP"


def _bytes(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"
