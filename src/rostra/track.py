"""Watching a run: listeners that show its events on a terminal, in a log, or in TensorBoard."""

from __future__ import annotations

import shlex
import sys
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from rostra.errors import RequestError
from rostra.events import Event

_WINDOW = 20  # steps over which speed is averaged


class Progress:
    """Shows a run to a person: a live bar on a terminal, plain lines anywhere else.

    Everything goes to `stream`, standard error when not given. Evaluations, checkpoints,
    samples of text and notices become lines of their own in both forms; plain lines of
    progress come every `log_every` steps and at the last.
    """

    def __init__(self, stream: TextIO | None = None, log_every: int = 10) -> None:
        self._stream = stream or sys.stderr
        self._log_every = log_every
        self._steps = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # tokens, seconds
        self._memory: int | None = None
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._shown: dict[str, Callable[[Event], None]] = {
            "started": self._started,
            "plan": self._plan,
            "plan_checked": lambda _: None,  # a notice tells where it was wrong
            "step": self._step,
            "memory": self._remember,
            "evaluation": self._evaluation,
            "generation": self._generation,
            "checkpoint": self._checkpoint,
            "notice": lambda event: self._say(event["message"]),
            "finished": self._finished,
            "stopped": self._stopped,
        }

    def __call__(self, event: Event) -> None:
        self._shown[event.kind](event)

    def close(self) -> None:
        """Take the bar from the terminal and give back the cursor; lines stay."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, text: str) -> None:
        text = _printable(text)
        if self._bar is not None:
            self._bar.console.print(Text(text))
        else:
            print(text, file=self._stream, flush=True)

    def _started(self, event: Event) -> None:
        self._steps = event["steps"]
        at = f", from step {event['step']:,}" if event["step"] else ""
        parameters, trained = event["parameters"], event["trainable_parameters"]
        trains = f" ({trained:,} trained)" if trained != parameters else ""
        self._say(f"{event['name']}: {parameters:,} parameters{trains}, {self._steps:,} steps{at}")
        if self._stream.isatty():
            self._bar = _make_bar(self._stream)
            self._task = self._bar.add_task(
                "", total=self._steps, completed=event["step"], status="first step ..."
            )
            self._bar.start()

    def _plan(self, event: Event) -> None:
        memory = event.fields.get("live_memory_bytes") or event["memory_bytes"]["total"]
        self._say(
            f"planned: {decimal(memory)} of tensors, {event['step_seconds']:.3g} s a step, "
            f"{event['tokens_per_second']:,.0f} tokens/s"
        )

    def _step(self, event: Event) -> None:
        step: int = event["step"]
        self._recent.append((event["tokens"], event["seconds"]))
        status = "  ".join(self._status(event))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
        elif step % self._log_every == 0 or step == self._steps:
            self._say(f"step {step}/{self._steps}  {status}")

    def _status(self, event: Event) -> list[str]:
        tokens = sum(t for t, _ in self._recent)
        seconds = sum(s for _, s in self._recent)
        left = (self._steps - event["step"]) * seconds / len(self._recent)
        parts = [f"loss {_number(event['loss'], '.4f')}", f"lr {event['learning_rate']:.1e}"]
        if self._bar is None:
            parts.append(f"gradient {_number(event['gradient_norm'], '.3g')}")
        parts.append(f"{tokens / max(seconds, 1e-9):,.0f} tokens/s")
        if self._memory is not None:
            parts.append(decimal(self._memory))
        return [*parts, f"{timedelta(seconds=round(left))} left"]

    def _remember(self, event: Event) -> None:
        self._memory = event["bytes"].get("total")

    def _evaluation(self, event: Event) -> None:
        self._say(
            f"step {event['step']:,}: held-out loss {_number(event['loss'], '.4f')}, "
            f"perplexity {_number(event['perplexity'], '.2f')}, "
            f"{_number(event['bits_per_byte'], '.4f')} bits per byte"
        )

    def _generation(self, event: Event) -> None:
        text = (event["prompt"] + event["text"]).strip().replace("\n", "\n  | ")
        self._say(f"step {event['step']:,}: sample\n  | {text}")

    def _checkpoint(self, event: Event) -> None:
        self._say(f"step {event['step']:,}: saved {event['path']} in {event['seconds']:.1f} s")

    def _finished(self, event: Event) -> None:
        self.close()
        self._say(f"finished at step {event['step']:,}")

    def _stopped(self, event: Event) -> None:
        self.close()
        self._say(f"stopped at step {event['step']:,}: {event['reason']}")


def _make_bar(stream: TextIO) -> Bar:
    return Bar(
        BarColumn(bar_width=None, table_column=Column(ratio=1)),  # what the numbers leave
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=Console(file=stream, highlight=False),
        expand=True,
        refresh_per_second=4,
        redirect_stdout=False,  # standard output is for results
        redirect_stderr=False,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _printable(text: str) -> str:
    """Without control characters: a model may write any, also those that steer a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


class TensorBoard:
    """Writes scalars of the run into `folder` for TensorBoard.

    `step` is the step that training goes on from; what an earlier process wrote for later
    steps is purged, so that no step is there twice.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RequestError(
                "monitor.tensorboard is on, but the package tensorboard cannot be imported "
                f"({error}). Run pip install tensorboard, or set monitor.tensorboard: false."
            ) from error
        # Step 0 too is written again by a run that starts anew.
        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)

    def __call__(self, event: Event) -> None:
        for tag, value in _scalars(event).items():
            if value is not None:
                self._writer.add_scalar(tag, value, event["step"], walltime=event.time)
        if event.kind == "checkpoint":  # a run killed after this goes on from here
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _scalars(event: Event) -> dict[str, float | None]:
    match event.kind:
        case "step":
            return {
                "train/loss": event["loss"],
                "train/gradient_norm": event["gradient_norm"],
                "train/learning_rate": event["learning_rate"],
                "train/tokens_per_second": event["tokens"] / max(event["seconds"], 1e-9),
                **{
                    f"data/samples_of_source_{source}": seen
                    for source, seen in enumerate(event.fields.get("source_samples", ()))
                },
            }
        case "memory":
            return {f"memory/{kind}": size for kind, size in event["bytes"].items()}
        case "evaluation":
            keys = ("loss", "perplexity", "bits_per_byte")
            return {f"eval/{key}": event[key] for key in keys}
    return {}


def show_summary(summary: dict[str, Any], run: Path) -> None:
    """Print a finished run for a person, on standard output: results, files, what to do next."""
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _summary_rows(summary):
        table.add_row(name, Text(value))
    console.print(table)
    if summary.get("generated"):
        console.print("\nIt writes:", Text(_printable(summary["generated"]).strip()), sep="\n")
    console.print()
    for name, path in (
        ("report", run / "report.html"),
        ("loss curve", run / "loss.png"),
        ("model", run / "model"),
        ("adapter", run / "adapter"),
    ):
        if path.exists():
            console.print(f"{name:<12}", Text(str(path)), soft_wrap=True)
    verb = "generate" if (run / "model").exists() or not (run / "adapter").exists() else "merge"
    console.print("\nGo on with:  ", Text(f"rostra {verb} {shlex.quote(str(run))}"), soft_wrap=True)


def _summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What is known of the run, as names and values in words."""
    forms: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("steps", "steps", "{:,}".format),
        ("tokens", "tokens trained on", "{:,}".format),
        ("parameters", "parameters", "{:,}".format),
        ("trainable_parameters", "  of these trained", "{:,}".format),
        ("loss", "loss", "{:.4f}".format),
        ("eval_loss", "held-out loss", "{:.4f}".format),
        ("bits_per_byte", "held-out bits per byte", "{:.4f}".format),
        ("xz_bits_per_byte", "  xz -9, each document", "{:.4f}".format),
        ("xz_whole_bits_per_byte", "  xz -9, all as one", "{:.4f}".format),
        ("tokens_per_second", "tokens per second", "{:,.0f}".format),
        ("peak_memory_bytes", "peak memory of tensors", decimal),
        ("seconds", "time in steps", lambda s: str(timedelta(seconds=round(s)))),
    )
    known = {key: value for key, value in summary.items() if value is not None}
    if known.get("trainable_parameters") == known.get("parameters"):
        known.pop("trainable_parameters", None)
    return [(name, form(known[key])) for key, name, form in forms if key in known]
