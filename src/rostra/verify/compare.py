"""How far a layout is from one process, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass

import torch
from torch import Tensor

from rostra.verify.steps import Found, whole

ROOM = 8.0  # times the spread of one process, beyond which a layout is wrong


@dataclass(frozen=True)
class Distance:
    """Between two runs, over all steps: the largest difference in loss (nats a token), the
    largest in gradient norm (as a share of it), the largest in any parameter at the end. Not a
    number where something is missing or not finite."""

    loss: float
    gradient: float
    parameter: float

    def within(self, other: Distance) -> bool:
        """Whether none is larger than the other's; false where one is not a number."""
        return all(a <= b for a, b in zip(astuple(self), astuple(other), strict=True))

    def worst(self, allowed: Distance) -> Worst:
        """The one that goes furthest beyond `allowed`."""
        names = ("loss", "gradient", "parameter")
        found = [Worst(name, getattr(self, name), getattr(allowed, name)) for name in names]
        return max(found, key=lambda each: each.excess)

    def to_dict(self) -> dict[str, float | None]:
        return {name: v if math.isfinite(v) else None for name, v in asdict(self).items()}


# What float32 rounding alone may give over the steps.
EXACT = Distance(loss=1e-5, gradient=1e-4, parameter=1e-4)


@dataclass(frozen=True)
class Worst:
    what: str
    value: float
    allowed: float

    @property
    def excess(self) -> float:
        return self.value / self.allowed if math.isfinite(self.value) else math.inf


@dataclass(frozen=True)
class Reference:
    """What one process computes."""

    losses: list[float]
    norms: list[float]
    targets: list[int]
    parameters: Mapping[str, Tensor]

    @classmethod
    def of(cls, found: Found, names: Sequence[str]) -> Reference:
        tensors = whole([found])
        known = {name: tensors[name] for name in names if name in tensors}  # of those that train
        return cls(found.losses, found.norms, found.targets, known)

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (*self.losses, *self.norms)))

    def distance(self, ranks: Sequence[Found]) -> Distance:
        """Of what all ranks of a layout saw: the furthest of them counts."""
        found = whole(ranks)
        parameters = [
            _largest(torch.abs(found[name] - value)) if name in found else math.nan
            for name, value in self.parameters.items()
        ]
        if any(rank.targets != self.targets for rank in ranks):
            return Distance(math.nan, math.nan, _max(parameters))
        losses = [(a, b) for r in ranks for a, b in zip(r.losses, self.losses, strict=True)]
        norms = [(a, b) for r in ranks for a, b in zip(r.norms, self.norms, strict=True)]
        return Distance(
            _max([abs(a - b) for a, b in losses]),
            _max([abs(a - b) / max(b, 1e-12) for a, b in norms]),
            _max(parameters),
        )


def allowed(spreads: Sequence[Distance], exact: bool) -> Distance:
    """The tolerance: `EXACT` or `ROOM` times what one process differs from itself by when the
    samples of a batch come in another order and in other micro batches, whichever is more.
    Where all is `exact` (float32), the loss has no such room."""
    loss, gradient, parameter = (
        max(floor, ROOM * _max(list(seen)))
        for floor, seen in zip(
            astuple(EXACT), zip(*map(astuple, spreads), strict=True), strict=True
        )
    )
    return Distance(EXACT.loss if exact else loss, gradient, parameter)


def _largest(tensor: Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0  # of NaN, NaN


def _max(values: Sequence[float]) -> float:
    """The largest; not a number when one is none."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
