"""What this machine has and lacks, and what any other machine would have: devices, nodes and
clusters as values, of which a catalogue knows the common ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rostra.hardware.cluster import PRECISIONS, Cluster, Curve, Device, Link, Node
from rostra.hardware.doctor import NEEDS, doctor, doctor_report, show_doctor
from rostra.hardware.probe import (
    Gpu,
    Hardware,
    best_device,
    can_compile,
    cpp_compiler,
    probe,
    python_headers,
    supports,
    usable_cores,
)
from rostra.lazy import on_first_use

if TYPE_CHECKING:
    from rostra.hardware.catalogue import device_names, read_cluster
    from rostra.hardware.machine import (
        calibration_path,
        load_calibration,
        save_calibration,
        this_cluster,
    )

__all__ = [
    "NEEDS",
    "PRECISIONS",
    "Cluster",
    "Curve",
    "Device",
    "Gpu",
    "Hardware",
    "Link",
    "Node",
    "best_device",
    "calibration_path",
    "can_compile",
    "cpp_compiler",
    "device_names",
    "doctor",
    "doctor_report",
    "load_calibration",
    "probe",
    "python_headers",
    "read_cluster",
    "save_calibration",
    "show_doctor",
    "supports",
    "this_cluster",
    "usable_cores",
]

_HOME = {
    "calibration_path": "rostra.hardware.machine",
    "device_names": "rostra.hardware.catalogue",
    "load_calibration": "rostra.hardware.machine",
    "read_cluster": "rostra.hardware.catalogue",
    "save_calibration": "rostra.hardware.machine",
    "this_cluster": "rostra.hardware.machine",
}

__getattr__ = on_first_use(__name__, _HOME)
