"""This machine as an entry of the catalogue, and what `rostra calibrate` has measured on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rostra.hardware.probe import Gpu, Hardware, best_device, probe

# Operations a core does in a cycle: two units that each multiply and add a vector of so many
# numbers (Intel 64 and IA-32 Architectures Optimization Reference Manual; AMX: one tile
# instruction of 16 x 16 x 32 bf16 products every 16 cycles).
_CORE_OPERATIONS = {
    "fp32": (("avx512_f", 64), ("avx2", 32), ("", 16)),
    "bf16": (("amx_bf16", 2048), ("avx512_bf16", 128)),
    "int8": (("amx_tile", 4096), ("avx512_vnni", 256)),
}
_USUAL_CLOCK = 2.5e9  # where the system does not tell it
_CORE_BANDWIDTH, _MOST_BANDWIDTH = 12e9, 200e9  # of memory, for one core and for all


def this_entry(hardware: Hardware) -> dict[str, Any]:
    """This machine in the catalogue's keys, as far as it tells of itself; the rest estimated."""
    if hardware.gpus and best_device().type == "cuda":
        return _gpu(hardware.gpus[0]) | {"host_memory": hardware.memory_bytes}
    return _processors(hardware)


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "memory": gpu.memory_bytes,
        "compute_capability": gpu.compute_capability,
    }


def _processors(hardware: Hardware) -> dict[str, Any]:
    frequency = psutil.cpu_freq()
    clock = max(frequency.max, frequency.current) * 1e6 if frequency else _USUAL_CLOCK
    peaks = {}
    for precision, ways in _CORE_OPERATIONS.items():
        for feature, operations in ways:
            if not feature or feature in hardware.cpu_features:
                peaks[precision] = operations * clock * hardware.cores
                break
    bandwidth = min(_CORE_BANDWIDTH * hardware.cores, _MOST_BANDWIDTH)
    return {
        "name": hardware.cpu,
        "kind": "cpu",
        "node": "desktop",
        "memory": hardware.memory_bytes,
        "bandwidth": bandwidth,
        "flops": peaks,
        "watts": 10.0 * hardware.cores,
        "host_memory": hardware.memory_bytes,
        "host_bandwidth": bandwidth,
        "source": "estimated from cores, clock and instructions",
    }


def calibration_path() -> Path:
    """Where the figures that were measured on this machine are kept."""
    folder = os.environ.get("ROSTRA_CACHE") or "~/.cache/rostra"
    return Path(folder).expanduser() / "calibration.json"


def save_calibration(values: dict[str, Any]) -> Path:
    """Keep `values` (of JSON) as those of this machine. Its table `cluster` has keys of the
    catalogue (`flops`, `bandwidth`, `link`, ...), which `this_cluster` then prefers."""
    path = calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    content = {"machine": _identity(probe()), "values": values}
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def load_calibration(
    hardware: Hardware | None = None, notice: Callable[[str], None] | None = None
) -> dict[str, Any] | None:
    """What was saved on this machine, or None: not calibrated, or elsewhere or with another
    version of torch, which `notice` is told."""
    path = calibration_path()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measured_on, values = content["machine"], content["values"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _tell(notice, f"{path}: is no calibration ({error}); run `rostra calibrate` again")
        return None
    now = _identity(hardware or probe())
    if changed := [key for key, value in now.items() if measured_on.get(key) != value]:
        was = ", ".join(f"{key} {measured_on.get(key)} is now {now[key]}" for key in changed)
        _tell(notice, f"{path}: was measured elsewhere ({was}); run `rostra calibrate` again")
        return None
    return values


def _identity(hardware: Hardware) -> dict[str, Any]:
    """What makes another machine of it."""
    return {
        "cpu": hardware.cpu,
        "cores": hardware.cores,
        "gpus": [gpu.name for gpu in hardware.gpus],
        "torch": hardware.versions.get("torch"),
    }


def _tell(notice: Callable[[str], None] | None, message: str) -> None:
    if notice is not None:
        notice(message)
