"""What share of a device's peaks its kernels reach.

Typical shares by kind of device are data, in `efficiency.yaml`, each with its source; those of
one machine are measured by `rostra calibrate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Self

from ruamel.yaml import YAML

from rostra.hardware.cluster import Curve, Device

ALWAYS = Curve(((0.0, 1.0),))


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks of a `Device` and its links, as curves over log2 of a size."""

    products: dict[str, Curve] = field(hash=False)  # by precision, over a product's operations
    attention: dict[str, Curve] = field(hash=False)  # likewise, over positions; heads of 128
    head_size: Curve = ALWAYS  # of `attention`, over numbers of a head
    masked: Curve = ALWAYS  # of `attention`, with a mask between documents, over positions
    epilogue: float = 0.0  # of writing a product's result, what its computing does not hide
    bandwidth: Curve = ALWAYS  # of the memory's, over the bytes that an operation moves
    loss: float = 1.0  # of `bandwidth`, by operations on logits
    optimizer: float = 1.0  # of the memory's bandwidth, by the optimizer's step
    optimizers: dict[str, float] = field(default_factory=dict, hash=False)  # likewise, by kind
    launch: float = 0.0  # seconds in which the host starts one operation
    ahead: bool = True  # the host starts operations while the device still computes others
    link: float = 1.0  # of the bandwidth of links in a node, by collectives
    collectives: dict[str, float] = field(default_factory=dict, hash=False)  # of `link`, by kind
    network: float = 1.0  # of the bandwidth between nodes
    host: float = 1.0  # of the bandwidth between a device and its host
    contention: float = 0.0  # of collectives that overlap, what computing loses to them

    def product(self, precision: str) -> Curve:
        """Of products of matrices in `precision`; of bf16 where it has no curve of its own."""
        return self.products.get(precision) or self.products["bf16"]

    def attend(self, precision: str) -> Curve:
        """Of attention in `precision`; of bf16 where it has no curve of its own."""
        return self.attention.get(precision) or self.attention["bf16"]

    def to_dict(self) -> dict[str, Any]:
        return {
            name: _plain(value)
            for name in self.__dataclass_fields__
            if (value := getattr(self, name)) is not None
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From what `to_dict` gave, or a table of `efficiency.yaml`: curves are tables of share
        by log2 of the size, or one number for all sizes; those of attention may be one for all
        precisions."""
        curves = ("head_size", "masked", "bandwidth")
        read = {name: _curve(values[name]) for name in curves if name in values}
        attention = values["attention"]
        if "bf16" not in attention:
            attention = {"bf16": attention}
        products, attention = (
            {str(kind): _curve(points) for kind, points in table.items()}
            for table in (values["products"], attention)
        )
        return cls(**{**values, **read, "products": products, "attention": attention})


def _curve(points: Any) -> Curve:
    if isinstance(points, int | float):
        return Curve(((0.0, float(points)),))
    return Curve(tuple(sorted((float(size), float(share)) for size, share in points.items())))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return {str(x): y for x, y in value.points} if isinstance(value, Curve) else value


def typical(device: Device) -> Efficiency:
    """What is usual for a device of this kind; see `architecture`."""
    table = dict(_tables()[architecture(device)])
    del table["source"]
    clock = table.pop("clock", {}).get(device.name, 1.0)
    found = Efficiency.from_dict(table)
    products = {kind: _times(curve, clock) for kind, curve in found.products.items()}
    attention = {kind: _times(curve, clock) for kind, curve in found.attention.items()}
    return replace(found, products=products, attention=attention)


def _times(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((size, factor * share) for size, share in curve.points))


def architecture(device: Device) -> str:
    """The kind of a device as `efficiency.yaml` names it: by CUDA's compute capability, or the
    maker's name; unknown GPUs are taken for the nearest NVIDIA kind."""
    if device.kind == "cpu":
        return "cpu"
    if device.compute_capability is None:
        return "cdna"
    major, minor = device.compute_capability
    known = {7: "turing" if minor else "volta", 8: "ada" if minor == 9 else "ampere", 9: "hopper"}
    return known.get(major, "volta" if major < 7 else "blackwell")


@cache
def _tables() -> dict[str, dict[str, Any]]:
    text = (files("rostra.plan") / "efficiency.yaml").read_text(encoding="utf-8")
    read: dict[str, dict[str, Any]] = YAML(typ="safe").load(text)
    return read
