"""Machines as values: what a device computes, holds and moves, and how devices are joined.

Figures are those of the makers (dense, without sparsity) in plain units: bytes, bytes a second,
operations a second, seconds, watts. What a kernel reaches of a peak is a `Curve`: measured on
this machine by `rostra calibrate`, or typical of the kind of device.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]


@dataclass(frozen=True)
class Curve:
    """What share of a peak is reached at a size: straight lines between points, in the logarithm
    of the size; beyond the ends, the end's."""

    points: tuple[tuple[float, float], ...]  # (log2 of the size, share), sizes rising

    def __call__(self, log_size: float) -> float:
        sizes = [size for size, _ in self.points]
        after = bisect_right(sizes, log_size)
        if after == 0:
            return self.points[0][1]
        if after == len(self.points):
            return self.points[-1][1]
        (x0, y0), (x1, y1) = self.points[after - 1], self.points[after]
        return y0 + (y1 - y0) * (log_size - x0) / (x1 - x0)


@dataclass(frozen=True)
class Device:
    """A GPU, or the processors of a node taken as one device."""

    name: str
    kind: Literal["gpu", "cpu"]
    memory_bytes: int
    flops: dict[Precision, float] = field(hash=False)  # dense, a second; absent: not computed
    bandwidth: float  # of its memory, bytes a second
    watts: float  # at full load
    compute_capability: tuple[int, int] | None = None
    source: str = ""


@dataclass(frozen=True)
class Link:
    """A way between devices: what each device sends (and at once receives) a second through it,
    and what a message costs before its first byte."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Node:
    """A machine: devices, the links between them, and what stands beside them."""

    device: Device
    devices: int
    link: Link  # between devices of the node
    host_link: Link  # between a device and the host's memory
    host_memory_bytes: int
    host_bandwidth: float  # of the host's memory, all devices together
    nvme_bytes: int = 0
    nvme_bandwidth: float = 0.0  # reading; all devices together


@dataclass(frozen=True)
class Cluster:
    """So many nodes alike."""

    node: Node
    nodes: int
    network: Link  # between nodes, for each device
    price_per_hour: float | None = None  # of one device
    price_source: str = ""  # whose price it is, and of when; empty for one that was given
    currency: str = "USD"
    name: str = ""
    calibrated: bool = False  # whether figures were measured on the machine itself

    @property
    def device(self) -> Device:
        return self.node.device

    @property
    def devices(self) -> int:
        return self.nodes * self.node.devices
