"""One measurement, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """`amount` is what was done in `seconds`: operations of products and attention, bytes, rows,
    logits; `spread` is half of what the middle half of the times differ by, as a share of the
    median."""

    what: str
    kind: str  # a precision, an operation, a collective
    sizes: tuple[int, ...]
    amount: float
    seconds: float
    spread: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds
