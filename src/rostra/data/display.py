"""Preparing as people see it: a bar or plain lines while it runs, and a table at the end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from rostra.data.prepared import Prepared
from rostra.data.progress import Progress

LINE_SECONDS = 10.0  # between plain lines
BAR_SECONDS = 0.1


class Display:
    """Shows progress on a stream: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._stage = ""
        self._began = self._shown = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._began = progress.stage, now
        terminal = self._stream.isatty()
        if now - self._shown < (BAR_SECONDS if terminal else LINE_SECONDS):
            return
        self._shown = now
        said = f"{progress.tasks:,}/{progress.of:,} tasks"
        if (seconds := now - self._began) >= BAR_SECONDS:  # else a rate says nothing
            rate = decimal(int(progress.bytes / seconds))
            said = f"{progress.documents / seconds:,.0f} documents/s, {rate}/s, {said}"
        if not terminal:
            print(f"{progress.stage}: {progress.share:.0%}, {said}", file=self._stream, flush=True)
            return
        if self._bar is None:
            self._bar = _make_bar(self._stream)
            self._task = self._bar.add_task("", total=1.0, status="")
        self._bar.update(
            self._task, completed=progress.share, description=progress.stage, status=said
        )

    def say(self, message: str) -> None:
        """A notice, as a line of its own."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=self._stream, flush=True)


def _make_bar(stream: TextIO) -> Bar:
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
    )
    bar.start()
    return bar


def show_prepared(prepared: Prepared, console: Console | None = None) -> None:
    """The table at the end: what became of each source, and why documents were rejected."""
    console = console or Console()
    columns = ("source", "documents", "rejected", "duplicates", "tokens", "bytes/token", "shards")
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in prepared.manifest["per_source"]:
        table.add_row(*_cells(row))
    console.print(table)
    if rejected := prepared.manifest["rejected"]:
        reasons = Table("filter", "reason", "documents", box=None, pad_edge=False)
        for found in rejected:
            reasons.add_row(found["filter"], found["reason"], f"{found['documents']:,}")
        console.print(reasons)
    held = prepared.held_out
    console.print(
        f"{prepared.train.tokens:,} tokens to train on, {held.tokens:,} held out, "
        f"in {prepared.folder}",
        soft_wrap=True,
        highlight=False,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = [f"{row[name]:,}" for name in ("documents", "rejected", "duplicates", "tokens")]
    ratio = f"{row['bytes'] / row['tokens']:.2f}" if row["tokens"] else ""
    return [row["source"], *numbers, ratio, f"{row['shards']:,}"]
