"""Seconds of single operations on a device: a roofline (Williams, Waterman & Patterson 2009, CACM
52(4)), in which a kernel takes the longer of its operations at the rate that kernels of its size
reach, and its bytes at the memory's bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from math import log2

from rostra.hardware.cluster import Device
from rostra.plan.efficiency import Efficiency

PRODUCTS = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bf16_pure": "bf16", "fp8": "fp8"}


class Kernels:
    """Seconds of single operations on a device."""

    def __init__(self, device: Device, efficiency: Efficiency) -> None:
        self.device, self.efficiency = device, efficiency

    def product(self, rows: float, inputs: float, outputs: float, precision: str) -> float:
        """Of a matrix [rows, inputs] times [inputs, outputs]: its operations, and then the part
        of writing the result that nothing hides; at least its bytes."""
        operations, width = 2.0 * rows * inputs * outputs, 4 if precision == "fp32" else 2
        result = width * rows * outputs
        moved = self.moved(width * (rows * inputs + inputs * outputs) + result)
        computed = operations / self.rate(precision, operations)
        return max(computed + self.efficiency.epilogue * self.moved(result), moved)

    def rate(self, precision: str, operations: float) -> float:
        """Operations a second of a product of so many."""
        return self.peak(precision) * self.efficiency.product(precision)(log2(operations))

    def peak(self, precision: str) -> float:
        """Operations a second; those of float32 where the device does not know `precision`."""
        known: Mapping[str, float] = {str(kind): rate for kind, rate in self.device.flops.items()}
        return known.get(precision) or known["fp32"]

    def attention(self, operations: float, length: float, size: int, precision: str) -> float:
        """Of fused attention over `length` positions, heads of `size` numbers."""
        precision = "bf16" if precision == "fp8" else precision
        share = self.efficiency.attend(precision)(log2(length))
        share *= self.efficiency.head_size(log2(size))
        return operations / (self.peak(precision) * share)

    def moved(self, size: float) -> float:
        """Of reading and writing `size` bytes."""
        if size <= 0:
            return 0.0
        return size / (self.device.bandwidth * self.efficiency.bandwidth(log2(size)))
