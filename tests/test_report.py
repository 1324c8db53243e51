from __future__ import annotations

import math
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rostra.errors import RequestError
from rostra.events import Events, JsonLines
from rostra.report import History, smooth, thin, write_report

LAYOUT = {"micro_batch": 4, "accumulation": 2, "engine": "torch", "compile": True}
NASTY = "<script>alert('x')</script> & \"quoted\""


class Run:
    """Writes the events of a run the way the loop does."""

    def __init__(self, folder: Path, clock: float = 1000.0) -> None:
        self.path = folder / "events.jsonl"
        self.now = clock
        self.lines = JsonLines()
        self.lines.open(self.path)
        self.events = Events(clock=lambda: self.now, listeners=[self.lines])

    def start(self, step: int, steps: int, name: str = "demosthenes") -> None:
        self.events.emit(
            "started",
            name=name,
            layout=LAYOUT,
            parameters=10_000_000,
            trainable_parameters=10_000_000,
            steps=steps,
            step=step,
        )

    def steps(self, first: int, last: int, loss: float | None = None) -> None:
        for step in range(first, last + 1):
            self.now += 0.5
            self.events.emit(
                "step",
                step=step,
                loss=9 * math.exp(-step / 60) + 2.5 + 0.2 * math.sin(step * 7.7)
                if loss is None
                else loss,
                tokens=4096,
                learning_rate=1e-3 * min(1, step / 9) * (0.55 + 0.45 * math.cos(step / 300 * 3.14)),
                gradient_norm=1 + 3 / step + 0.1 * math.cos(step * 3.3),
                seconds=0.5,
                accepted=True,
            )

    def evaluate(self, step: int, loss: float) -> None:
        self.events.emit(
            "evaluation",
            step=step,
            loss=loss,
            perplexity=math.exp(loss),
            bits_per_byte=loss / 2,
            seconds=2.0,
        )


def _whole_run(folder: Path, name: str = "demosthenes", steps: int = 300) -> Path:
    run = Run(folder)
    run.start(0, steps, name)
    run.events.emit(
        "memory",
        step=2,
        bytes={
            "parameters": 40_000_000,
            "gradients": 40_000_000,
            "optimizer": 80_000_000,
            "activations": 300_000_000,
            "total": 460_000_000,
        },
    )
    for part in range(1, 4):
        last = steps * part // 3
        run.steps(steps * (part - 1) // 3 + 1, last)
        run.evaluate(last, 9 * math.exp(-last / 60) + 2.7)
        run.events.emit("generation", step=last, prompt="def main", text=f"():\n    {NASTY}")
        run.events.emit("checkpoint", step=last, path=f"checkpoints/step-{last}", seconds=0.2)
    run.events.notice(f"passed over {NASTY}")
    summary = {
        "steps": steps,
        "tokens": 4096 * steps,
        "loss": 2.6,
        "eval_loss": 2.7,
        "bits_per_byte": 1.36,
        "tokens_per_second": 8192.0,
        "peak_memory_bytes": 460_000_000,
        "planned_peak_memory_bytes": None,
        "layout": LAYOUT,
        "xz_bits_per_byte": 2.07,
        "xz_whole_bits_per_byte": 1.73,
        "resident_bytes": 900_000_000,
    }
    run.events.emit("finished", step=steps, summary=summary)
    run.lines.close()
    return run.path


class Page(HTMLParser):
    """Elements and text of a page, and whether its elements nest."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_report_shows_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run:\n  name: demosthenes\n")
    made = write_report(_whole_run(tmp_path), tmp_path)
    assert made == tmp_path / "report.html"
    page = Page(made.read_text())
    assert page.open == []
    for part in (
        "demosthenes",
        "finished",
        "1.380",  # bits per byte, held-out
        "2.070",  # xz
        "1.730",
        "8,192",
        "460.0 MB",
        "10,000,000",
        "1,228,800",
        "checkpoints/step-300",
        "accumulation",
        "name: demosthenes",
        "def main",
    ):
        assert part in page.text, part
    picture = (tmp_path / "loss.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture.startswith(b"\x89PNG")
    assert width > 1000
    assert height > 500
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.yaml",
        "events.jsonl",
        "loss.png",
        "report.html",
    ]


def test_report_needs_no_network_runs_no_code_and_escapes_all(tmp_path: Path) -> None:
    html = write_report(_whole_run(tmp_path, name="a $x^2$ <b>&amp;"), tmp_path).read_text()
    page = Page(html)
    assert NASTY in page.text
    assert "a $x^2$ <b>&amp;: loss" in page.text
    assert not page.all("script")
    assert not page.all("img")
    assert not page.all("b")
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                assert value is not None
                assert value.startswith("#")
    assert "@import" not in html
    assert html.count("url(") == html.count("url(#")


def test_report_is_accessible(tmp_path: Path) -> None:
    page = Page(write_report(_whole_run(tmp_path), tmp_path).read_text())
    assert page.all("html")[0]["lang"] == "en"
    assert [x["role"] for x in page.all("svg")] == ["img"] * 3
    labels = [x["aria-label"] or "" for x in page.all("svg")]
    assert labels[0].startswith("Loss over steps. From 11.")
    assert all("at step 300" in label for label in labels)
    assert all("scope" in x for x in page.all("th"))
    ids = [x["id"] for _, x in page.elements if "id" in x]
    assert len(ids) == len(set(ids))
    targets = {v[1:] for _, x in page.elements if (v := x.get("xlink:href"))}
    assert targets <= set(ids)


def _contrast(first: str, second: str) -> float:
    """Of two colours `#rrggbb` (WCAG 2.2, relative luminance)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_have_contrast_in_light_and_dark(tmp_path: Path) -> None:
    html = write_report(_whole_run(tmp_path), tmp_path).read_text()
    themes = html.split("@media (prefers-color-scheme: dark)")
    for theme in themes:
        colours: dict[str, str] = {}
        for part in theme.split("--")[1:]:
            name, colon, value = part.partition(": ")
            if colon and value.startswith("#"):
                colours.setdefault(name, value[:7])
        for text in ("ink", "quiet", "plot-ink"):
            assert _contrast(colours[text], colours["page"]) >= 4.5, text
            assert _contrast(colours[text], colours["panel"]) >= 4.5, text
        for mark in ("plot-line", "plot-dot"):
            assert _contrast(colours[mark], colours["page"]) >= 3, mark


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.start(0, 30)
    first.steps(1, 10, loss=5.0)
    first.events.emit("checkpoint", step=10, path="checkpoints/step-10", seconds=0.1)
    first.steps(11, 20, loss=7.0)
    first.evaluate(15, 7.0)
    first.events.emit("checkpoint", step=20, path="checkpoints/step-20", seconds=0.1)
    first.lines.close()
    with first.path.open("a") as file:
        file.write('{"time": 1010, "event": "st')  # killed in the middle of a line
    second = Run(tmp_path, clock=5000.0)
    second.events.notice("took over a lock")
    second.start(10, 30)
    second.steps(11, 15, loss=3.0)
    second.lines.close()
    history = History.read(first.path)
    assert history.points("loss") == [(s, 5.0) for s in range(1, 11)] + [
        (s, 3.0) for s in range(11, 16)
    ]
    assert history.held_out == []
    assert list(history.checkpoints) == [10]
    assert history.processes == 2
    assert history.seconds == pytest.approx(12.5)
    text = Page(write_report(first.path, tmp_path).read_text()).text
    assert "not finished" in text
    assert "step 15 of 30" in text


def test_a_run_that_just_began_or_went_astray_has_a_report(tmp_path: Path) -> None:
    run = Run(tmp_path)
    Page(write_report(run.path, tmp_path).read_text())  # not one event
    run.start(0, 10)
    assert "No step yet" in write_report(run.path, tmp_path).read_text()
    run.events.emit(
        "step",
        step=1,
        loss=float("nan"),
        tokens=0,
        learning_rate=0.1,
        gradient_norm=None,
        seconds=0.0,
        accepted=False,
    )
    run.events.emit(
        "evaluation", step=1, loss=None, perplexity=None, bits_per_byte=None, seconds=0.0
    )
    run.events.emit("memory", step=1, bytes={})
    run.events.emit("stopped", step=1, reason="SIGTERM")
    run.lines.close()
    page = Page(write_report(run.path, tmp_path).read_text())
    assert "stopped at step 1 (SIGTERM)" in page.text
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_without_events_there_is_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file"):
        write_report(tmp_path / "events.jsonl", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_long_run_makes_a_page_of_the_same_size(tmp_path: Path) -> None:
    html = write_report(_whole_run(tmp_path, steps=9000), tmp_path).read_text()
    assert len(html) < 400_000


def test_smoothing_has_no_bias_and_thinning_keeps_the_mean() -> None:
    flat = [(step, 3.0) for step in range(1, 4001)]
    assert all(value == pytest.approx(3.0) for _, value in smooth(flat))
    ramp = [(step, float(step)) for step in range(1, 4001)]
    assert all(value == pytest.approx(step, abs=1) for step, value in smooth(ramp)[1000:3000])
    thinned = thin(ramp)
    assert len(thinned) <= 1500
    assert all(value == pytest.approx(step, abs=2) for step, value in thinned)
    assert smooth([]) == thin([]) == []
