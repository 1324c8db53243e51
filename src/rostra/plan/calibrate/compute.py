"""What a rank measures of the machine it runs on: products of matrices, attention, pointwise
work, the cost of starting an operation, and what ranks send each other.

On the CPU a rank with one thread counts processor time, which other work on the machine hardly
changes; several threads, and ranks that wait for each other, go by the clock; GPUs by their own
events. Every figure is the median of several, with their spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rostra.config.schema import OptimizerSection
from rostra.errors import RequestError
from rostra.layout import OptimizerStates
from rostra.optim import make_optimizers
from rostra.plan.calibrate.figure import Figure

Run = Callable[[], Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Sizes for CPUs and GPUs alike: those of more than `Bench.most` operations are passed over.
ROWS = (128, 512, 2048, 8192, 16384)
MATRICES = (  # inputs and outputs, as decoder layers and heads have them
    (256, 256), (512, 512), (512, 2048), (2048, 512), (1024, 4096), (512, 8192), (4096, 4096),
    (8192, 8192), (4096, 16384),
)  # fmt: skip
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
_LEAST, _MOST = 3, 25  # times that a figure is measured
_COLD = 2**28  # bytes, more than caches hold


@dataclass(frozen=True)
class Bench:
    """Where, how much and how long a rank measures: `most` operations, or a fitting number of
    bytes and rows, in one figure, which takes about `budget` seconds."""

    device: torch.device
    threads: int = 1
    most: int = 1 << 31
    budget: float = 0.02

    def figure(self, what: str, kind: str, sizes: Sequence[int], amount: float, run: Run) -> Figure:
        seconds, spread = self.timed(run)
        return Figure(what, kind, tuple(sizes), amount, seconds, spread)

    def timed(self, run: Run) -> tuple[float, float]:
        """Median seconds of `run`, and the spread."""
        run()  # allocates, and decides how
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < _LEAST or (
            len(times) < _MOST and time.perf_counter() - began < self.budget
        ):
            times.append(self._once(run))
        low, middle, high = quantiles(times, n=4, method="inclusive")
        return middle, (high - low) / 2 / middle

    def _once(self, run: Run) -> float:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1000
        clock = time.process_time if self.threads == 1 else time.perf_counter
        began = clock()
        run()
        return clock() - began

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)


def products(bench: Bench, precision: str) -> Iterator[Figure]:
    """A linear layer's three products, as forward and backward pass call them, by shape (rows,
    inputs, outputs): `forward`, `input` and `weight` (their gradients). Matrices are others
    each time, as in a model: none is in a cache."""
    room = bench.random(_COLD // DTYPES[precision].itemsize, dtype=DTYPES[precision])
    for (inputs, outputs), rows in product(MATRICES, ROWS):
        amount, sizes = 2.0 * rows * inputs * outputs, (rows, inputs, outputs)
        largest = max(rows * inputs, rows * outputs, inputs * outputs)
        if amount <= bench.most and largest <= len(room):
            for name, run in _linear(_Fresh(room), *sizes).items():
                yield bench.figure(f"product {name}", precision, sizes, amount, run)


class _Fresh:
    """Matrices out of one large tensor, each time from where the last ended."""

    def __init__(self, room: Tensor) -> None:
        self.room, self.next = room, 0

    def __call__(self, rows: int, columns: int) -> Tensor:
        size = rows * columns
        start = self.next if self.next + size <= len(self.room) else 0
        self.next = start + size
        return self.room[start : self.next].view(rows, columns)


def _linear(matrix: _Fresh, rows: int, inputs: int, outputs: int) -> dict[str, Run]:
    return {
        "forward": lambda: functional.linear(matrix(rows, inputs), matrix(outputs, inputs)),
        "input": lambda: matrix(rows, outputs) @ matrix(outputs, inputs),
        "weight": lambda: matrix(rows, outputs).t() @ matrix(rows, inputs),
    }


def attention(bench: Bench, precision: str) -> Iterator[Figure]:
    """Attention forward, and forward with backward, by length and head size: `causal`, and
    `masked`, when a sample holds several documents and a mask keeps them apart. `amount` has the
    operations of the causal half: 2·T²·size forward for each head, 5 products of T²·size backward
    (Dao et al. 2022, arXiv:2205.14135, algorithm 4)."""
    on_gpu = bench.device.type == "cuda"  # which wants many heads at once
    for size, length in product((64, 128), LENGTHS):
        heads = max(16, 2**17 // length) if on_gpu else max(1, min(8, 4096 // length))
        forward = 2.0 * heads * length**2 * size
        if 3.5 * forward > bench.most:
            continue
        for kind in ("causal", "masked"):
            if kind == "causal" or size == 64:
                runs = _attend(bench, precision, (1, heads, length, size), kind)
                sizes = (length, size, heads)
                yield bench.figure(f"attention forward {kind}", precision, sizes, forward, runs[0])
                yield bench.figure(
                    f"attention both {kind}", precision, sizes, 3.5 * forward, runs[1]
                )


def _attend(
    bench: Bench, precision: str, shape: tuple[int, int, int, int], kind: str
) -> tuple[Run, Run]:
    length, dtype = shape[2], DTYPES[precision]
    q, k, v = (bench.random(*shape, dtype=dtype).requires_grad_() for _ in range(3))
    mask = None
    if kind == "masked":
        document = torch.arange(length, device=bench.device) * 3 // length
        mask = (document[:, None] == document).tril()[None, None]

    def run() -> Tensor:
        causal = mask is None
        return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)

    def both() -> None:
        out = run()
        out.backward(out.detach())

    return torch.no_grad()(run), both


def pointwise(bench: Bench) -> Iterator[Figure]:
    """Bytes read and written a second, by operation and size in bytes of one operand."""
    for size in (2**16, 2**20, 2**23, min(2**26, bench.most >> 3)):
        for name, (amount, run) in _operations(bench, size).items():
            yield bench.figure("pointwise", name, (size,), amount, run)


def _operations(bench: Bench, size: int) -> dict[str, tuple[float, Run]]:
    a, b, out = (bench.random(size // 4096, 1024) for _ in range(3))
    half, one = out.bfloat16(), a[:, 0].clone()
    return {
        "add": (3 * size, lambda: torch.add(a, b, out=out)),
        "copy": (2 * size, lambda: out.copy_(a)),
        "cast": (1.5 * size, lambda: half.copy_(a)),
        "exp": (2 * size, lambda: torch.exp(a, out=out)),
        "silu": (2 * size, lambda: functional.silu(a)),
        "sum": (size, lambda: torch.sum(a, 1, out=one)),
    }


def updates(bench: Bench) -> Iterator[Figure]:
    """A step of each optimizer but Muon, which is made of products; of AdamW also with states of
    fewer bits, where they can be had. `amount` are the numbers that it updates."""
    for name in ("adamw", "sgd", "lion", "adafactor"):
        yield _update(bench, name, "fp32", min(1 << 24, bench.most >> 6))
    for states in ("int8", "int4", "fp8"):
        with suppress(RequestError):  # torchao is not installed, or the device lacks it
            yield _update(bench, "adamw", states, min(1 << 21, bench.most >> 6))


def _update(bench: Bench, name: str, states: OptimizerStates, numbers: int) -> Figure:
    width = 1024
    named = [(f"{i}", nn.Parameter(bench.random(numbers // 2 // width, width))) for i in range(2)]
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)  # equal numbers are quantised in half the time
    optimizers = make_optimizers(
        OptimizerSection.model_validate({"name": name}), named, set(), states
    )
    kind = name if states == "fp32" else states
    return bench.figure("optimizer", kind, (numbers,), numbers, optimizers.step)


def host_copies(bench: Bench) -> Iterator[Figure]:
    """Between a GPU and its host, from and to memory that stays in place; nothing on a CPU."""
    if bench.device.type != "cuda":
        return
    size = 2**28
    here = torch.ones(size // 4, device=bench.device)
    there = torch.ones(size // 4, pin_memory=True)
    yield bench.figure("host", "up", (size,), size, lambda: here.copy_(there, non_blocking=True))
    yield bench.figure("host", "down", (size,), size, lambda: there.copy_(here, non_blocking=True))


def launches(bench: Bench) -> Iterator[Figure]:
    """Seconds that an operation costs before it computes: `plain`, and `graph`, recorded for and
    run in a backward pass as well, which is twice an operation. `amount` counts operations."""
    count = 100
    x = torch.ones(8, device=bench.device)
    y = torch.ones(8, device=bench.device, requires_grad=True)

    def plain() -> None:
        for _ in range(count):
            x.mul(1.0)

    def graph() -> None:
        z = y
        for _ in range(count):
            z = z.mul(1.0)
        z.backward(x)

    host = replace(bench, device=torch.device("cpu"))
    yield host.figure("launch", "plain", (count,), count, plain)
    yield host.figure("launch", "graph", (count,), 2 * count, graph)
