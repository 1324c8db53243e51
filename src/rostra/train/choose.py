"""The layout of a run until the planner chooses it, and whether a run may be resumed."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from rostra.config import Config
from rostra.errors import RequestError
from rostra.hardware import can_compile, supports
from rostra.layout import Compute, Layout, refusals

COMPILE_SECONDS = 40.0  # seen on CPUs for compiled layers and loss, forward and backward
COMPILE_GAIN = 0.3  # share of an uncompiled step that compiling saves at the least

# What may differ when a run is resumed: nothing that changes what was computed before.
FREE_KEYS = (
    "run.name", "run.output", "data.cache", "train.steps", "train.tokens", "train.epochs",
    "train.micro_batch_size", "train.compile", "parallel", "memory", "checkpoint", "evaluate",
    "monitor", "launch", "serve", "stability.bad_steps",
)  # fmt: skip


def choose_layout(config: Config, device: torch.device, parameters: int, tokens: int) -> Layout:
    """A sound layout for one process. `tokens` is the length of the whole run."""
    length, size = config.data.sequence_length, config.train.global_batch_size
    asked = config.train.micro_batch_size
    fits = max(1, (4096 if device.type == "cpu" else 16384) // length)
    micro = min(size, fits) if asked == "auto" else asked
    axes = {} if config.parallel == "auto" else config.parallel.model_dump()
    compute = choose_compute(config, device)
    compiled = config.train.compile
    if compiled == "auto":
        compiled = can_compile(device) and _compile_pays(device, compute, parameters, tokens)
    elif compiled and not can_compile(device):
        raise RequestError(
            "train.compile = true: torch.compile lacks something here; `rostra doctor` tells "
            "what and how to get it. Or set train.compile: false"
        )
    layout = Layout(
        micro_batch=micro,
        accumulation=math.ceil(size / micro),
        compute=compute,
        compile=compiled,
        **axes,
    )
    if refused := refusals(layout):
        raise RequestError("parallel: " + "; ".join(rule.reason for rule in refused))
    return layout


def choose_compute(config: Config, device: torch.device) -> Compute:
    """bf16 where the device computes it fast, unless the config says otherwise."""
    asked = config.precision.compute
    if asked != "auto":
        return asked
    return "bf16" if supports(device, "bf16") else "fp32"


def _compile_pays(device: torch.device, compute: Compute, parameters: int, tokens: int) -> bool:
    """Whether compiling saves more than twice what it costs, over the whole run.

    The run's length is foretold from its operations, 6 a parameter and token (Kaplan et al.,
    2020, arXiv:2001.08361, section 2.1), and the speed of a matrix product measured here.
    """
    dtype = torch.float32 if compute == "fp32" else torch.bfloat16
    size = 1024 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device).to(dtype)
    best = math.inf
    for _ in range(4):
        began = time.perf_counter()
        product = a @ a
        float(product[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - began)
    seconds = 6 * parameters * tokens / (2 * size**3 / best)
    return seconds * COMPILE_GAIN > 2 * COMPILE_SECONDS


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys that differ between two resolved configs, with both values."""
    flat_old, flat_new = _flat(old), _flat(new)
    keys = sorted(set(flat_old) | set(flat_new))
    return {
        key: (flat_old.get(key), flat_new.get(key))
        for key in keys
        if flat_old.get(key) != flat_new.get(key)
    }


def check_resumable(
    old: dict[str, Any], new: dict[str, Any], folder: str, new_learning_rate: bool
) -> None:
    """Raises RequestError when a changed key would have changed what was computed before."""
    free: tuple[str, ...] = FREE_KEYS
    if new_learning_rate:
        free = (*free, "optimizer.learning_rate", "optimizer.matrix_learning_rate", "schedule")
    refused = [
        f"{key}: {was!r} in {folder}, {now!r} asked for"
        for key, (was, now) in changed_keys(old, new).items()
        if not any(key == name or key.startswith(f"{name}.") for name in free)
    ]
    if not refused:
        return
    hint = "Restore the values, or start a new run with another run.output"
    if any(line.startswith(("optimizer.", "schedule.")) for line in refused):
        hint += "; --new-learning-rate allows another learning rate or schedule from here on"
    listed = "\n  ".join(refused)
    raise RequestError(f"{folder}: this run was started with another config:\n  {listed}\n{hint}.")


def check_same_data(old: dict[str, str], new: dict[str, str], folder: str) -> None:
    """Raises RequestError when the documents or the tokenizer are no longer those of the run."""
    if old == new:
        return
    what = "tokenizer has" if old["tokenizer"] != new["tokenizer"] else "documents have"
    raise RequestError(
        f"{folder}: the {what} changed since this run was started (data.sources and what they "
        "point to, or the tokenizer). Restore them, or start a new run with another run.output; "
        f"`--from {folder}` gives it this run's weights."
    )


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, dict) and values:
        return {
            key: value
            for name, inner in values.items()
            for key, value in _flat(inner, f"{prefix}.{name}" if prefix else name).items()
        }
    return {prefix: values}
