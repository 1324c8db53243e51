"""What a plan says of one layout: memory, time, and what they make of the whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rostra.layout import Layout

# Kinds of memory on a device, in the order in which they are shown.
KINDS = (
    "parameters",  # with buffers; 16-bit and quantised ones at their size
    "quantization",  # scales of quantised weights, and the one weight that is dequantised
    "gradients",
    "optimizer",  # states and master weights
    "activations",  # saved for the backward pass, and what a layer has at its peak
    "logits",  # logits and loss
    "gathered",  # parameters of other ranks while they are computed with
    "communication",  # buffers of collectives; DeepSpeed's buckets
    "reserved",  # what the allocator rounds up and keeps, the device's context, libraries
)
# Beside them, where it is more than a step's: what is there while the model is loaded, or a
# checkpoint saved.
OUTSIDE = ("loading", "saving")
LASTING = ("parameters", "quantization", "optimizer")  # of them, from step to step


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, that of the pipeline which needs most, at its peak over a step.

    `live` is the peak of live tensor bytes, the figure that training measures as
    `peak_memory_bytes`; `total` adds what the allocator and the device keep beside them.
    """

    kinds: dict[str, int] = field(hash=False)
    host: int = 0  # bytes in the host's memory for this rank, at the peak of the step
    nvme: int = 0
    loading: int = 0  # on the device, at the peak while the model is loaded
    loading_host: int = 0
    saving: int = 0  # on the device, at the peak while a checkpoint is saved
    saving_host: int = 0
    # Or "linears": of an unknown family, by its matrices; "scaled": either, as traces of other
    # layouts showed; "trace".
    source: str = "formula"

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def live(self) -> int:
        return self.total - self.kinds.get("reserved", 0)

    @property
    def peak(self) -> int:
        """What the device must have: of the step, of loading and of saving, the most."""
        return max(self.total, max(self.loading, self.saving) + self.kinds.get("reserved", 0))

    @property
    def peak_kinds(self) -> dict[str, int]:
        """`peak` by kind: a step's, and what loading, or saving, needs beyond it."""
        more = self.peak - self.total
        kind = OUTSIDE[self.saving > self.loading]
        return {**self.kinds, kind: more} if more else self.kinds

    @property
    def host_peak(self) -> int:
        """What the host must have for this rank, likewise."""
        return max(self.host, self.loading_host, self.saving_host)


@dataclass(frozen=True)
class Time:
    """Seconds of one step by what they go to; parts that overlap count once, where they show."""

    compute: float  # matrix products and attention of forward and backward
    memory: float  # pointwise work, norms, loss: bound by the memory's bandwidth
    recompute: float  # of checkpointed activations
    communication: dict[str, float] = field(hash=False)  # by mesh axis, as far as it shows
    bubble: float = 0.0  # of the pipeline
    offload: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0  # launches of operations, Python
    model_flops: float = 0.0  # of a step, all ranks, without recomputation (for MFU)
    hardware_flops: float = 0.0  # with it (for HFU)

    @property
    def step(self) -> float:
        return (
            self.compute
            + self.memory
            + self.recompute
            + sum(self.communication.values())
            + self.bubble
            + self.offload
            + self.optimizer
            + self.overhead
        )


@dataclass(frozen=True)
class Candidate:
    """A layout with what it needs and what it does. In its dict `memory_bytes`,
    `live_memory_bytes` and `host_memory_bytes` are of a step; `peak_bytes` and `host_peak_bytes`
    are what must be there, for loading and saving too, and what a plan goes by."""

    layout: Layout
    memory: Memory
    time: Time
    tokens_per_second: float  # all ranks together
    mfu: float  # of the peak of the layout's precision; Chowdhery et al. 2022, arXiv:2204.02311
    hfu: float
    hours: float | None  # of the whole run
    price: float | None
    energy_kwh: float | None

    def to_dict(self) -> dict[str, Any]:
        memory = {**self.memory.kinds, "total": self.memory.total}
        return {
            "layout": self.layout.to_dict(),
            "memory_bytes": memory,
            "live_memory_bytes": self.memory.live,
            "peak_bytes": self.memory.peak,
            "loading_bytes": self.memory.loading,
            "saving_bytes": self.memory.saving,
            "host_memory_bytes": self.memory.host,
            "host_peak_bytes": self.memory.host_peak,
            "nvme_bytes": self.memory.nvme,
            "memory_source": self.memory.source,
            "step_seconds": self.time.step,
            "seconds": {
                "compute": self.time.compute,
                "memory": self.time.memory,
                "recompute": self.time.recompute,
                **{f"communication_{axis}": s for axis, s in self.time.communication.items()},
                "bubble": self.time.bubble,
                "offload": self.time.offload,
                "optimizer": self.time.optimizer,
                "overhead": self.time.overhead,
            },
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "hours": self.hours,
            "price": self.price,
            "energy_kwh": self.energy_kwh,
        }
