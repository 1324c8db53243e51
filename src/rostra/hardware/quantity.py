"""Figures with their units, as data sheets write them: `3.35 TB/s`, `80 GB`, `989 TFLOPS`."""

from __future__ import annotations

import re

_PREFIXES = {
    "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
    "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9,
}  # fmt: skip
# Other ways to write a unit, and how many of the unit they are.
_SAME = {
    "B/s": {"Bps": 1.0, "b/s": 1 / 8, "bps": 1 / 8, "bit/s": 1 / 8},
    "FLOPS": {"FLOP/s": 1.0, "OPS": 1.0, "OP/s": 1.0, "flops": 1.0},
}
_NUMBER = re.compile(r"\s*([-+]?[\d_]*\.?\d+(?:[eE][-+]?\d+)?)\s*(\S*)\s*")


def quantity(value: object, unit: str) -> float:
    """`value` in `unit` (`B`, `B/s`, `FLOPS`, `s`, `W`); a bare number is in that unit already.

    Raises ValueError that says how to write it.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (found := _NUMBER.fullmatch(value)) is not None:
        number, written = found.groups()
        for name, factor in ({unit: 1.0} | _SAME.get(unit, {}) | {"": 1.0}).items():
            prefix = written.removesuffix(name) if name else written
            if written.endswith(name) and prefix in _PREFIXES and (name or not written):
                return float(number) * _PREFIXES[prefix] * factor
    raise ValueError(f"{value!r} is no figure in {unit}; write it as `12.5 G{unit}` or a number")
