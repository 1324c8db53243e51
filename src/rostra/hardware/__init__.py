"""What this machine has and lacks, and what any other machine would have: devices, nodes and
clusters as values, of which a catalogue knows the common ones."""

from __future__ import annotations

from rostra.hardware.catalogue import catalogue, read_cluster
from rostra.hardware.cluster import PRECISIONS, Cluster, Curve, Device, Link, Node
from rostra.hardware.doctor import NEEDS, doctor, doctor_report, show_doctor
from rostra.hardware.machine import (
    calibration_path,
    load_calibration,
    save_calibration,
    this_cluster,
)
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
    "catalogue",
    "cpp_compiler",
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
