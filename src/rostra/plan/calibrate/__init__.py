"""Measuring this machine, so that plans for it are of what it does and not of what is typical."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rostra.lazy import on_first_use

if TYPE_CHECKING:
    from rostra.plan.calibrate.measured import measured_efficiency
    from rostra.plan.calibrate.run import calibrate
    from rostra.plan.calibrate.show import show_calibration
    from rostra.plan.calibrate.values import Calibration, Share

__all__ = ["Calibration", "Share", "calibrate", "measured_efficiency", "show_calibration"]

__getattr__ = on_first_use(
    __name__,
    {
        "Calibration": "rostra.plan.calibrate.values",
        "Share": "rostra.plan.calibrate.values",
        "calibrate": "rostra.plan.calibrate.run",
        "measured_efficiency": "rostra.plan.calibrate.measured",
        "show_calibration": "rostra.plan.calibrate.show",
    },
)
