"""What a config says of a run's layout by itself, and whether a run may be resumed."""

from __future__ import annotations

import math
import os
import time
from typing import Any, Literal

import torch

from rostra.config import Config
from rostra.config.schema import ParallelTable
from rostra.errors import RequestError
from rostra.hardware import can_compile, supports
from rostra.layout import Compute, Layout, explain
from rostra.plan.axes import as_in_file, choose_axes

# Positions of a micro batch on a CPU: beyond, a step took longer, as less of it stays in caches.
POSITIONS = 4096
COMPILE_SECONDS = 40.0  # seen on CPUs for compiled layers and loss, forward and backward
COMPILE_GAIN = 0.3  # share of an uncompiled step that compiling saves at the least

# What may differ when a run is resumed: nothing that changes what was computed before.
FREE_KEYS = (
    "run.name", "run.output", "data.cache", "train.steps", "train.tokens", "train.epochs",
    "train.micro_batch_size", "train.compile", "parallel", "memory", "checkpoint", "evaluate",
    "quantization.cache", "data.load.read_ahead", "data.load.workers", "data.load.cache",
    "data.load.cache_bytes", "data.prepare.engine", "data.prepare.workers", "data.prepare.spark",
    "data.prepare.slurm", "monitor", "launch", "serve", "stability.bad_steps",
)  # fmt: skip


def choose_layout(
    config: Config, device: torch.device, parameters: int, tokens: int, ranks: int = 1
) -> Layout:
    """A sound layout on so many ranks, without a plan: what the config leaves open is not used,
    and a micro batch is small. `tokens` is the length of the whole run.

    Raises RequestError when the config's axes do not make up `ranks`, or the one table of what
    may be combined refuses them.
    """
    size, memory = config.train.global_batch_size, config.memory
    table = config.parallel if config.parallel != "auto" else ParallelTable()
    asked = config.train.micro_batch_size
    file, table, memory = as_in_file(table, memory)
    if asked == "auto":
        asked = file.get("train_micro_batch_size_per_gpu", asked)
    axes = choose_axes(table, ranks)
    rows = math.ceil(size / (axes["replicate"] * axes["shard"]))
    micro = _micro_batch(asked, config, device, axes, rows)
    compute = choose_compute(config, device)
    compiled = config.train.compile
    if compiled == "auto":
        alone = ranks == 1 and table.engine == "torch"
        alone = alone and (config.data.packed not in ("none", "chunk") or full_rows(config))
        compiled = (
            alone and can_compile(device) and _compile_pays(device, compute, parameters, tokens)
        )
    elif compiled and not can_compile(device):
        raise RequestError(
            "train.compile = true: torch.compile lacks something here; `rostra doctor` tells "
            "what and how to get it. Or set train.compile: false"
        )
    layout = Layout(
        micro_batch=micro,
        accumulation=math.ceil(rows / micro),
        engine=table.engine,
        context_method=table.context_method if axes["context"] > 1 else "ulysses",
        pipeline_schedule=table.schedule or ("1f1b" if axes["pipeline"] > 1 else "none"),
        stages=table.stages,
        activation_checkpointing=_settled(memory.activation_checkpointing),
        offload_parameters=_settled(memory.offload.parameters),
        offload_optimizer=_settled(memory.offload.optimizer),
        compute=compute,
        reduction=config.precision.reduction,
        quantization=config.quantization.kind,
        adapter=config.adapter.kind,
        optimizer_states=memory.optimizer_states,
        optimizer_in_backward=memory.optimizer_in_backward,
        compile=compiled,
        **axes,
    )
    if refused := explain(layout):
        raise RequestError(refused)
    return layout


def _settled(asked: Any) -> Any:
    return "none" if asked == "auto" else asked


def ranks_wanted(config: Config) -> int:
    """Ranks that the config asks for when nobody says how many there are: what its axes make
    up, or else one for each GPU, as far as there are samples for them."""
    table, gpus = config.parallel, torch.cuda.device_count()
    if table == "auto":
        return max(1, min(gpus, config.train.global_batch_size))
    sizes = (table.context, table.tensor, table.pipeline, table.expert)
    asked = math.prod(sizes) * (table.replicate or 1) * (table.shard or 1)
    if table.replicate is None and table.shard is None:
        return asked * max(1, min(gpus // asked, config.train.global_batch_size))
    return asked


def room_for_ranks() -> int:
    """Ranks that are started on this machine without being asked for by number: one for each
    GPU; without any, a few more than there are cores do no harm."""
    return torch.cuda.device_count() or max(8, os.cpu_count() or 1)


def full_rows(config: Config, layout: Layout | None = None) -> bool:
    """Whether all samples must have one shape: in a pipeline, when positions are split, and for
    compiled code, which is made for one."""
    table = config.parallel
    if layout is not None:
        return layout.compile or max(layout.pipeline, layout.context) > 1
    split = table != "auto" and max(table.pipeline, table.context) > 1
    return split or config.train.compile is True


def _micro_batch(
    asked: int | Literal["auto"],
    config: Config,
    device: torch.device,
    axes: dict[str, Any],
    rows: int,
) -> int:
    if asked != "auto":
        return min(asked, rows)
    positions = config.data.sequence_length // axes["context"]
    fits = max(1, (POSITIONS if device.type == "cpu" else 4 * POSITIONS) // max(1, positions))
    if axes["pipeline"] > 1:  # several micro batches must be under way
        fits = min(fits, max(1, rows // (2 * axes["pipeline"])))
    return min(rows, fits)


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
        for key, (was, now) in changed_keys(_unweighted(old), _unweighted(new)).items()
        if not any(key == name or key.startswith(f"{name}.") for name in free)
    ]
    if not refused:
        return
    hint = "Restore the values, or start a new run with another run.output"
    if any(line.startswith(("optimizer.", "schedule.")) for line in refused):
        hint += "; --new-learning-rate allows another learning rate or schedule from here on"
    listed = "\n  ".join(refused)
    raise RequestError(f"{folder}: this run was started with another config:\n  {listed}\n{hint}.")


def _unweighted(config: dict[str, Any]) -> dict[str, Any]:
    """The config without how often each source is seen: that may change from any step on."""
    sources = [
        {key: value for key, value in source.items() if key not in ("weight", "epochs")}
        for source in config["data"]["sources"]
    ]
    return {**config, "data": {**config["data"], "sources": sources}}


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
