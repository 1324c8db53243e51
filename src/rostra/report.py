"""The report of a run, made from its events alone: a page, and its loss curve as a picture."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.filesize import decimal

from rostra.errors import RequestError
from rostra.events import Event, read_events
from rostra.store import write_file

Points = list[tuple[int, float]]  # step, value

_MOST_POINTS = 1500  # in a curve; more are averaged
_LIGHT = {
    "ink": "#1f2328",
    "grid": "#d8dee4",
    "faint": "#9cc3f0",
    "line": "#0a58ca",
    "dot": "#c2410c",
}


@dataclass
class History:
    """A run as its events tell it: each step once, as it last happened."""

    started: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    generations: dict[int, dict[str, Any]] = field(default_factory=dict)
    checkpoints: dict[int, dict[str, Any]] = field(default_factory=dict)
    notices: list[tuple[float, str]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    planned: dict[str, Any] = field(default_factory=dict)  # what was expected of a step
    measured: dict[str, Any] = field(default_factory=dict)  # the same, as it came
    summary: dict[str, Any] = field(default_factory=dict)
    end: str = "not finished"
    processes: int = 0
    seconds: float = 0.0  # that its processes lived, evaluation and saving included

    @classmethod
    def read(cls, path: Path) -> History:
        history = cls()
        began = last = 0.0
        for event in read_events(path):
            if event.kind == "started":
                history.seconds += last - began
                began = event.time
            if event.kind != "notice":  # a process may give notices before it starts training
                last = event.time
            history.add(event)
        history.seconds += last - began
        return history

    def add(self, event: Event) -> None:
        by_step = {
            "step": self.steps,
            "evaluation": self.evaluations,
            "generation": self.generations,
            "checkpoint": self.checkpoints,
        }
        match event.kind:
            case "started":
                self._go_on_from(event["step"], list(by_step.values()))
                self.started = event.fields
            case "memory":
                self.memory = event["bytes"]
            case "plan":
                live = event.fields.get("live_memory_bytes")
                self.planned, self.measured = {**event.fields, "memory_bytes": live}, {}
            case "plan_checked":
                self.planned, self.measured = event["planned"], event["measured"]
            case "notice":
                self.notices.append((event.time, event["message"]))
            case "finished":
                self.summary, self.end = event["summary"], "finished"
            case "stopped":
                self.end = f"stopped at step {event['step']:,} ({event['reason']})"
            case kind:
                by_step[kind][event["step"]] = event.fields

    def _go_on_from(self, step: int, series: list[dict[int, dict[str, Any]]]) -> None:
        """Forget what came after the checkpoint that a new process went on from."""
        self.processes += 1
        self.summary, self.end = {}, "not finished"
        for values in series:
            for later in [s for s in values if s > step]:
                del values[later]

    def points(self, key: str) -> Points:
        """A value of the steps over the steps; those that are not finite are left out."""
        return _finite(self.steps, key)

    @property
    def held_out(self) -> Points:
        return _finite(self.evaluations, "loss")

    @property
    def tokens_per_second(self) -> float | None:
        known = self.summary.get("tokens_per_second")
        rates = sorted(s["tokens"] / s["seconds"] for s in self.steps.values() if s["seconds"] > 0)
        return known if known is not None else rates[len(rates) // 2] if rates else None


def _finite(series: dict[int, dict[str, Any]], key: str) -> Points:
    found = ((step, values.get(key)) for step, values in sorted(series.items()))
    return [(step, v) for step, v in found if v is not None and math.isfinite(v)]


def smooth(points: Points) -> Points:
    """Means weighted by keep ** distance, to both sides, over about a fiftieth of the curve."""
    values = [value for _, value in points]
    keep = 1 - 1 / max(1.0, len(values) / 50)
    sums = _both_sides(values, keep)
    weights = _both_sides([1.0] * len(values), keep)
    return [(step, s / w) for (step, _), s, w in zip(points, sums, weights, strict=True)]


def _both_sides(values: list[float], keep: float) -> list[float]:
    """Of each value, the sum of all with weights keep ** distance."""

    def one_side(values: list[float]) -> list[float]:
        return list(accumulate(values, lambda total, value: keep * total + value))

    behind, before = one_side(values), one_side(values[::-1])[::-1]
    return [a + b - value for a, b, value in zip(behind, before, values, strict=True)]


def thin(points: Points) -> Points:
    """At most `_MOST_POINTS` points, each the mean of as many neighbours."""
    size = -(-len(points) // _MOST_POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[len(part) // 2][0], sum(v for _, v in part) / len(part)) for part in parts]


def write_report(events_path: Path, folder: Path) -> Path:
    """Write `loss.png` and `report.html`, which needs no other file, into `folder`.

    All is rebuilt from the events; `config.yaml` is shown if it lies in `folder`. Returns the
    page's path. Raises RequestError when there is no file of events.
    """
    if not events_path.is_file():
        raise RequestError(f"{events_path}: there is no such file; a report is made from it")
    history = History.read(events_path)
    picture = io.BytesIO()
    loss_figure(history, _LIGHT).savefig(picture, format="png", dpi=160)
    write_file(folder / "loss.png", picture.getvalue())
    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.is_file() else None
    write_file(folder / "report.html", page(history, text))
    return folder / "report.html"


def loss_figure(history: History, colours: dict[str, str]) -> Figure:
    """Training loss, faint and smoothed, and held-out loss at its steps."""
    name = history.started.get("name", "run")
    figure, axes = _empty_figure(f"{name}: loss", "nats per token", colours, (9, 4.8))
    points = history.points("loss")
    axes.plot(*_xy(thin(points)), color=colours["faint"], linewidth=0.9, label="training")
    axes.plot(
        *_xy(thin(smooth(points))), color=colours["line"], linewidth=2, label="training, smoothed"
    )
    held_out = history.held_out
    for final, marker, label in ((False, "o", "held-out"), (True, "D", "held-out, at the end")):
        kind = [(s, v) for s, v in held_out if history.evaluations[s].get("final", False) is final]
        if kind:
            axes.plot(*_xy(kind), color=colours["dot"], marker=marker, linestyle=":", label=label)
    if points or held_out:
        axes.legend(frameon=False, labelcolor=colours["ink"])
    return figure


def _line_figure(history: History, key: str, title: str, colours: dict[str, str]) -> Figure:
    figure, axes = _empty_figure(title, "", colours, (9, 2.6))
    axes.plot(*_xy(thin(history.points(key))), color=colours["line"], linewidth=1.5)
    return figure


def _empty_figure(
    title: str, unit: str, colours: dict[str, str], size: tuple[float, float]
) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", color=colours["ink"], fontsize=13, parse_math=False)
    axes.set_xlabel("step", color=colours["ink"], fontsize=11)
    axes.set_ylabel(unit, color=colours["ink"], fontsize=11)
    axes.tick_params(colors=colours["ink"], labelsize=10, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colours["grid"])
    return figure, axes


def _xy(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def inline_svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure as an element of a page: it takes colours and font from the page's style.

    `figure` is drawn in the colours of `_PLACEHOLDERS`, which become `var(--plot-...)`.
    """
    file = io.StringIO()
    # Text stays text, to be read aloud and searched; names inside do not change by chance.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for key, colour in _PLACEHOLDERS.items():
        svg = svg.replace(colour, f"var(--plot-{key})")
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    head = f'<svg class="plot" role="img" aria-label="{escape(description)}" {size[0]}'
    return Markup(re.sub(r"<svg[^>]*", lambda _: head, svg, count=1))


# Colours that nothing else in a figure has.
_PLACEHOLDERS = {key: f"#0badc{i}" for i, key in enumerate(_LIGHT)}


def page(history: History, config: str | None) -> str:
    """The report as HTML. Everything that comes from the run is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"bytes": _bytes, "number": _number, "clock": _clock, "span": _span}
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    text = environment.from_string(template).render(
        run=history,
        name=history.started.get("name", "run"),
        summary=history.summary,
        headline=_headline(history),
        memory=history.memory or history.summary.get("memory_bytes") or {},
        planned=_planned(history),
        curves=_curves(history),
        layout=history.started.get("layout") or history.summary.get("layout") or {},
        config=config,
    )
    return text + "\n"


def _curves(history: History) -> list[Markup]:
    loss = history.points("loss")
    curves = [
        inline_svg(
            loss_figure(history, _PLACEHOLDERS), "loss", f"Loss over steps. {_told(loss, '.3f')}"
        )
    ]
    for key, title in (("learning_rate", "Learning rate"), ("gradient_norm", "Gradient norm")):
        if points := history.points(key):
            figure = _line_figure(history, key, title, _PLACEHOLDERS)
            curves.append(
                inline_svg(figure, key.replace("_", "-"), f"{title}. {_told(points, '.3g')}")
            )
    return curves


def _told(points: Points, form: str) -> str:
    """What a curve shows, for those who do not see it."""
    if not points:
        return "No step yet."
    values = [v for _, v in points]
    first, last = points[0], points[-1]
    return (
        f"From {first[1]:{form}} at step {first[0]} to {last[1]:{form}} at step {last[0]}; "
        f"lowest {min(values):{form}}, highest {max(values):{form}}."
    )


def _headline(history: History) -> list[tuple[str, str, list[str]]]:
    """The numbers that matter most: name, value, remarks. Those not known are left out."""
    held_out = history.evaluations.get(max(history.evaluations, default=0), {})
    losses = history.points("loss")
    against = [
        f"xz -9, {what}: {value:.3f}"
        for key, what in (
            ("xz_bits_per_byte", "each document"),
            ("xz_whole_bits_per_byte", "all as one"),
        )
        if (value := history.summary.get(key)) is not None
    ]
    rows = (
        ("Bits per byte, held-out", held_out.get("bits_per_byte"), against),
        ("Loss, held-out", held_out.get("loss"), ["nats per token"]),
        ("Perplexity, held-out", held_out.get("perplexity"), ["per token"]),
        ("Loss, training", losses[-1][1] if losses else None, ["nats per token, last step"]),
    )
    return [(name, _number(value), notes) for name, value, notes in rows if value is not None]


def _planned(history: History) -> list[tuple[str, str, str, str]]:
    """What the plan expected of a step beside what was measured: name, both, their difference."""
    rows = []
    for key, name, form in (
        ("memory_bytes", "Memory", _bytes),
        ("step_seconds", "Seconds", lambda x: _number(x, ".3g")),
        ("tokens_per_second", "Tokens per second", lambda x: _number(x, ",.0f")),
    ):
        planned, measured = history.planned.get(key), history.measured.get(key)
        if planned:
            known = "–" if measured is None else f"{measured / planned - 1:+.1%}"
            rows.append((name, form(planned), form(measured), known))
    return rows


def _bytes(value: float | None) -> str:
    return "–" if value is None else decimal(int(value))


def _number(value: float | None, form: str = ",.3f") -> str:
    return "–" if value is None else format(value, form)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _span(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
