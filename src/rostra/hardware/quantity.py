"""Figures with their units, as data sheets write them: `3.35 TB/s`, `80 GB`, `989 TFLOPS`."""

from __future__ import annotations

import re
from decimal import Decimal

_PREFIXES: dict[str, str | int] = {
    "": "1", "k": "1e3", "K": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15",
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
    "m": "1e-3", "u": "1e-6", "n": "1e-9",
}  # fmt: skip
# Other ways to write a unit, and how much of the unit they are.
_SAME = {
    "B/s": {"Bps": "1", "b/s": "0.125", "bps": "0.125", "bit/s": "0.125"},
    "FLOPS": {"FLOP/s": "1", "OPS": "1", "OP/s": "1"},
}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)\s*")


def quantity(value: object, unit: str) -> float:
    """`value` in `unit` (`B`, `B/s`, `FLOPS`, `s`, `W`); a bare number is in that unit already.

    Raises ValueError that says how to write it.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (found := _NUMBER.fullmatch(value)) is not None:
        number, written = found.groups()
        if not written:
            return float(number)
        for name, part in ({unit: "1"} | _SAME.get(unit, {})).items():
            prefix = written.removesuffix(name)
            if prefix != written and prefix in _PREFIXES:
                return float(Decimal(number) * Decimal(_PREFIXES[prefix]) * Decimal(part))
    example = "5 us" if unit == "s" else f"12.5 G{unit}"
    raise ValueError(f"{value!r} is no figure in {unit}; write it as `{example}` or a number")
