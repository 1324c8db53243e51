"""What is missing on this machine for which feature, and how to get it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rostra.hardware.probe import (
    Hardware,
    best_device,
    cpp_compiler,
    probe,
    python_headers,
    supports,
)


@dataclass(frozen=True)
class Need:
    """A row of the doctor's table. `find` says what was found, or None."""

    name: str
    purpose: str
    get: str  # how to get it
    find: Callable[[Hardware], str | None]
    optional: bool  # all works without it, if more slowly or with one tool less


def _library(name: str) -> Callable[[Hardware], str | None]:
    return lambda hardware: hardware.versions.get(name)


def _gpu_names(hardware: Hardware) -> str | None:
    return ", ".join(gpu.name for gpu in hardware.gpus) or None


def _fast_bf16(hardware: Hardware) -> str | None:
    del hardware
    device = best_device()
    return f"on {device.type}" if supports(device, "bf16") else None


NEEDS: tuple[Need, ...] = (
    Need(
        "GPU",
        "training many times as fast as on a CPU",
        "a machine with one, its driver, and PyTorch for it: https://pytorch.org/get-started",
        _gpu_names,
        optional=True,
    ),
    Need(
        "fast bfloat16",
        "precision.compute: bf16 that is faster than fp32 (`auto` chooses by this)",
        "a CPU with avx512_bf16 or AMX, or a GPU of compute capability 8.0 or newer",
        _fast_bf16,
        optional=True,
    ),
    Need(
        "C++ compiler",
        "train.compile on a CPU, which makes steps faster",
        "Debian: apt-get install g++; or name one in the variable CXX",
        lambda _: cpp_compiler(),
        optional=False,
    ),
    Need(
        "Python headers",
        "train.compile",
        "Debian: apt-get install python3-dev",
        lambda _: python_headers(),
        optional=False,
    ),
    Need(
        "flash-attn",
        "model.attention: flash_attention_2, on GPUs of compute capability 8.0 or newer",
        "pip install flash-attn --no-build-isolation",
        _library("flash-attn"),
        optional=True,
    ),
    Need(
        "tensorboard",
        "monitor.tensorboard, on by default",
        "pip install tensorboard",
        _library("tensorboard"),
        optional=False,
    ),
    Need(
        "accelerate",
        "benchmarks/throughput.py: the Hugging Face Trainer beside Rostra",
        "pip install accelerate",
        _library("accelerate"),
        optional=True,
    ),
)


@dataclass(frozen=True)
class Check:
    """What became of one need: there; not there and a feature lacks it; not there, optional."""

    name: str
    status: Literal["ok", "missing", "optional"]
    found: str | None
    purpose: str
    get: str


def doctor(hardware: Hardware) -> list[Check]:
    """Every row of `NEEDS` against this machine."""
    checks = []
    for need in NEEDS:
        found = need.find(hardware)
        absent: Literal["missing", "optional"] = "optional" if need.optional else "missing"
        status = absent if found is None else "ok"
        checks.append(Check(need.name, status, found, need.purpose, need.get))
    return checks


def doctor_report() -> dict[str, Any]:
    """`hardware` and `checks` of this machine, as values for JSON."""
    hardware = probe()
    return {"hardware": hardware.to_dict(), "checks": [asdict(c) for c in doctor(hardware)]}


def show_doctor(report: dict[str, Any]) -> None:
    """Print what `doctor_report` found as tables, on standard output."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    has = report["hardware"]
    machine = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("processor", f"{has['cpu']}, {has['cores']} cores usable"),
        ("instructions", ", ".join(has["cpu_features"]) or "none of note"),
        ("memory", f"{decimal(has['memory_bytes'])}, {decimal(has['free_memory_bytes'])} free"),
        ("disk", f"{decimal(has['free_disk_bytes'])} free here"),
        *(("GPU", f"{gpu['name']}, {decimal(gpu['memory_bytes'])}") for gpu in has["gpus"]),
        ("Python", has["python"]),
        ("libraries", ", ".join(f"{k} {v}" for k, v in has["versions"].items())),
    ):
        machine.add_row(name, Text(value))
    marks = {"ok": "[green]ok[/]", "missing": "[red]missing[/]", "optional": "[yellow]optional[/]"}
    needs = Table(box=None, padding=(0, 2, 0, 0))
    for header in ("", "what", "for", "found, or how to get it"):
        needs.add_column(header, header_style="bold", overflow="fold")
    for check in report["checks"]:
        told = Text(check["found"] or check["get"])
        needs.add_row(marks[check["status"]], check["name"], Text(check["purpose"]), told)
    console = Console()
    console.print(machine, "", needs, sep="\n")
