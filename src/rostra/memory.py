"""The one instrument for memory: live tensor bytes of one optimizer step, by kind.

The count comes from the reports that PyTorch's allocators make to its profiler: one for every
block taken and given back, on the CPU as on a GPU. A `TorchDispatchMode` gives the same numbers
in eager mode, to the byte, but sees nothing of code made by `torch.compile`, which takes its
buffers straight from the allocator; `tests/test_memory.py` holds both. Scratch that libraries
take from the system by themselves (oneDNN, the C library) is no tensor and is not counted, and
neither are the copies that gloo makes within a collective, which its threads give back at a time
of their own; `resident_bytes` has both.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from rich.filesize import decimal
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from rostra.errors import TrainingFailed

KINDS = ("parameters", "gradients", "optimizer", "activations")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
_LARGE_BLOCK = 1 << 20
_COLLECTIVES = ("c10d::", "gloo:")  # PyTorch's names of what takes memory within
_GRADIENT = "rostra.gradient:"  # marks in the profiler's stream; the address follows


@dataclass
class Memory:
    """What `measure` found; empty until its block has ended.

    `bytes` has the bytes of each of `KINDS` at the moment of the peak, and their sum as
    `total`. Parameters include buffers; activations are all else the step holds: saved
    tensors, logits, casts, temporary results.
    """

    bytes: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def measure(
    model: nn.Module, *optimizers: Optimizer, device: torch.device | None = None
) -> Iterator[Memory]:
    """Measure the peak of live tensor bytes on `device` (that of the parameters, when not given)
    over the block: one optimizer step.

    What the optimizers change and the model does not hold (master weights) counts as the
    optimizers', like their states.

    Start with cleared gradients and compiled code that has run before: gradients from earlier
    are counted to the end of the block, and compiling has tensors of its own. A batch counts
    when it is brought to the device within the block. Costs some tens of microseconds an
    operation: measure a step now and then, not every one.

    Raises: RuntimeError of torch when another profiler is running.
    """
    # Kineto writes lines to standard error when it starts and stops, into the progress bar.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    device = device or next(model.parameters()).device
    parameters = _storages([*model.parameters(), *model.buffers()], device)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    updated: list[Tensor] = [p for group in groups for p in group["params"]]

    def held() -> dict[int, int]:
        """Storages of the optimizers: states, master weights."""
        states = tree_leaves([dict(optimizer.state) for optimizer in optimizers])
        found = _storages([*(x for x in states if isinstance(x, Tensor)), *updated], device)
        return {address: size for address, size in found.items() if address not in parameters}

    before = {
        "parameters": sum(parameters.values()),
        "gradients": sum(_storages((x.grad for x in updated), device).values()),
        "optimizer": sum(held().values()),
        "activations": 0,
    }
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    memory = Memory()
    profile: Any = torch.autograd.profiler.profile(profile_memory=True)
    with profile, _marked_gradients(model, updated, optimizers):
        yield memory
    memory.bytes = _at_peak(before, _stream(profile, device), set(held()))
    if device.type != "cpu":  # whole blocks, and what else lives on the device
        peak = torch.accelerator.max_memory_allocated(device)
        memory.bytes["activations"] += max(0, peak - memory.bytes["total"])
        memory.bytes["total"] = max(peak, memory.bytes["total"])


def _storages(
    tensors: Iterable[Tensor | None], device: torch.device | None = None
) -> dict[int, int]:
    """Address and bytes of each storage once, however many tensors share it (tied weights), on
    a kind of `device` when given: what is offloaded lies elsewhere."""
    found = {}
    for tensor in tensors:
        for plain in () if tensor is None else stored_tensors(tensor):
            here = device is None or plain.device.type == device.type
            if here and plain.untyped_storage().nbytes():
                found[plain.untyped_storage().data_ptr()] = plain.untyped_storage().nbytes()
    return found


def stored_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """What holds the bytes: a rank's part of a DTensor or of what DeepSpeed's ZeRO-3 has cut
    (`ds_tensor`), codes and scales of a low-bit one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield getattr(tensor, "ds_tensor", tensor)
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(inner := getattr(tensor, name), Tensor):
            yield from stored_tensors(inner)


@contextlib.contextmanager
def _marked_gradients(
    model: nn.Module, updated: list[Tensor], optimizers: Iterable[Optimizer]
) -> Iterator[None]:
    """Put a mark with its address into the profiler's stream when a gradient is ready.

    All of `updated` are looked at whenever one of the model's gradients is ready: hooks that
    ran before may have moved it to a master weight. And before the optimizer's step: gradients
    of sharded parameters come without a hook.
    """
    waiting = list(updated)

    def mark(*_: Any) -> None:
        for tensor in [x for x in waiting if x.grad is not None]:
            waiting[:] = [x for x in waiting if x is not tensor]
            for address in _storages([tensor.grad]):
                with torch.profiler.record_function(f"{_GRADIENT}{address}"):
                    pass

    hooks = [
        p.register_post_accumulate_grad_hook(mark) for p in model.parameters() if p.requires_grad
    ]
    hooks += [optimizer.register_step_pre_hook(mark) for optimizer in optimizers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _stream(profile: Any, device: torch.device) -> list[tuple[int, int]]:
    """What happened on `device`, in order of time: (address, bytes taken or, negative, given
    back), and (address, 0) where a gradient became ready there."""
    happened = []
    pending = list(profile.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        if event.name.startswith(_COLLECTIVES):
            continue
        pending.extend(event.children)
        if event.name.startswith(_GRADIENT):
            happened.append((event.start_time_ns, int(event.name[len(_GRADIENT) :]), 0))
        elif event.name == "[memory]" and event.extra_fields.device.type == device.type:
            fields = event.extra_fields
            happened.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    happened.sort(key=lambda x: x[0])
    return [(address, size) for _, address, size in happened]


def _at_peak(
    before: dict[str, int], stream: list[tuple[int, int]], states: set[int]
) -> dict[str, int]:
    """Bytes by kind, and their `total`, at the moment when the total was largest.

    `states` are the addresses of the optimizer's storages after the step.
    """
    kinds = _kinds_of_blocks(stream, states)
    now = dict(before)
    live: dict[int, str] = {}
    sizes: dict[int, int] = {}
    peak, total = dict(before), sum(before.values())
    highest = total
    for index, (address, size) in enumerate(stream):
        if size > 0:
            if address in live:  # given back by a thread that is not profiled
                total -= sizes[address]
                now[live[address]] -= sizes[address]
            live[address], sizes[address] = kinds.get(index, "activations"), size
        elif size == 0 or address not in live:  # a mark; or a block from before, counted above
            continue
        now[live[address] if size > 0 else live.pop(address)] += size
        total += size
        if total > highest:
            highest, peak = total, dict(now)
    return {**peak, "total": highest}


def _kinds_of_blocks(stream: list[tuple[int, int]], states: set[int]) -> dict[int, str]:
    """Of the blocks taken in `stream`, by index: which became gradients or optimizer states."""
    taken: dict[int, int] = {}  # index of the block that lives at an address
    kinds = {}
    for index, (address, size) in enumerate(stream):
        if size > 0:
            taken[address] = index
        elif size < 0:
            taken.pop(address, None)
        elif address in taken:
            kinds[taken[address]] = "gradients"
    return kinds | {taken[a]: "optimizer" for a in states if a in taken}


@contextlib.contextmanager
def explain_out_of_memory(planned: Mapping[str, int] | None = None) -> Iterator[None]:
    """Turn a device's lack of memory into a message that says what was there, what the plan had
    expected (`planned`, bytes by kind, when there was one), and what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = f"the device is out of memory: {str(error).splitlines()[0]}"
        raise TrainingFailed(" ".join((said, *_seen(), _advice(planned or {})))) from error


def _seen() -> Iterator[str]:
    """What the device holds, where its allocator tells."""
    if torch.accelerator.is_available():
        peak = torch.accelerator.max_memory_allocated()
        kept = torch.accelerator.max_memory_reserved()
        yield f"Seen: {decimal(peak)} of tensors at the peak, {decimal(kept)} reserved."


def _advice(planned: Mapping[str, int]) -> str:
    changes = "Lower train.micro_batch_size (the result stays the same) or data.sequence_length"
    if not planned:
        return f"{changes}."
    largest = sorted(planned.items(), key=lambda x: -x[1])[:3]
    kinds = ", ".join(f"{kind} {decimal(size)}" for kind, size in largest if size)
    if largest[0][0] in ("activations", "logits"):
        changes += ", or set memory.activation_checkpointing: full"
    else:
        changes = (
            "Share the model among more ranks (parallel.sharding: full_shard), set "
            "memory.optimizer_states: int8 or memory.offload.optimizer: cpu, or train an adapter"
        )
    return (
        f"The plan expected {decimal(sum(planned.values()))} ({kinds}): other programs may use "
        f"the device too, or the plan errs for this model. {changes}; `rostra plan` tells what "
        "each would save."
    )


def keep_freed_memory(keep: bool) -> None:
    """Whether the C library keeps the memory that is freed, for the next step, or gives each
    large block back to the kernel at once.

    Kept memory is quicker: writing a new tensor of 32 MB took 0.5 ms from it, and 7.5 ms from
    fresh pages. But blocks of many sizes leave gaps: 3.4 GB were resident for 1.7 GB of tensors
    of QLoRA, and 2.4 GB with large blocks given back. By default glibc raises the size from
    which it does that to 32 MB as it sees blocks being freed, and has both troubles. Does
    nothing with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        if keep:
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)  # give nothing back
            libc.mallopt(_M_MMAP_MAX, 0)  # map no block by itself
        else:
            libc.mallopt(_M_MMAP_MAX, 1 << 16)  # as it is by default
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def resident_bytes() -> int:
    """Physical memory that this process holds now: tensors, libraries, everything."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most physical memory that this process has held since it began."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB on Linux
