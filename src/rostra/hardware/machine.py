"""This machine as a cluster: what it tells of itself, and what `rostra calibrate` has measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rostra.errors import RequestError
from rostra.hardware.catalogue import Entry, cluster_of, known
from rostra.hardware.cluster import Cluster
from rostra.hardware.probe import Hardware, best_device, probe

Tell = Callable[[str], None]

# Operations that a core does in a cycle: two units that each multiply and add a vector (Intel 64
# and IA-32 Architectures Optimization Reference Manual; with AMX, 16 x 16 x 32 products of bf16
# in 16 cycles).
_CORE = {
    "fp32": (("avx512_f", 64), ("avx2", 32), ("", 16)),
    "bf16": (("amx_bf16", 2048), ("avx512_bf16", 128)),
    "int8": (("amx_tile", 4096), ("avx512_vnni", 256)),
}
# Operations that a multiprocessor does in a cycle, by CUDA's compute capability: of float32, and
# of 16 bits on tensor cores with sums in float32 (NVIDIA's whitepapers on Volta to Blackwell).
# GeForce cards from 8.6 on do half of the latter.
_MULTIPROCESSOR = {
    (7, 0): (128, 1024), (7, 5): (128, 1024), (8, 0): (128, 2048), (8, 6): (256, 1024),
    (8, 9): (256, 1024), (9, 0): (256, 4096), (10, 0): (256, 8192), (12, 0): (256, 1024),
}  # fmt: skip
_CLOCK = 2.5e9  # of a processor whose system does not tell it
_CORE_BANDWIDTH, _BANDWIDTH = 12e9, 200e9  # of memory, for one core and for all
_CORE_WATTS, _GPU_WATTS = 10.0, 300.0


def this_cluster(
    ranks: int | None = None, price: float | None = None, notice: Tell | None = None
) -> Cluster:
    """The machine that this runs on: all its GPUs, or its processors as one device.

    With `ranks`, so many of the GPUs; or so many devices that share the processors' cores and
    memory. Peaks of a GPU are the catalogue's, by its name, or estimated from its clock; peaks
    and bandwidth of processors are those that `rostra calibrate` measured, or estimated from
    cores and instructions. Links and disk are those measured, or usual ones. `notice` is told
    why a calibration is not used. There is no price but one that is given.
    Raises RequestError when there are fewer GPUs than `ranks`.
    """
    hardware = probe()
    gpus = len(hardware.gpus) if best_device().type == "cuda" else 0
    found = _gpu_entry(hardware) if gpus else _processors(hardware)
    values = load_calibration(hardware, notice) or {}
    whole = found | {"devices": gpus or 1, "price_per_hour": None, "price_source": ""}
    whole |= {"nvme": hardware.free_disk_bytes} | _measured(values, ranks or gpus or 1, gpus > 0)
    entry = Entry.model_validate(known().complete(whole))
    return cluster_of(_shared(entry, ranks), price, calibrated=bool(values))


def _shared(entry: Entry, ranks: int | None) -> Entry:
    if ranks is None or ranks == entry.devices:
        return entry
    if entry.kind == "gpu":
        if ranks > entry.devices:
            raise RequestError(f"{ranks} ranks: this machine has {entry.devices} {entry.name}")
        return entry.model_copy(update={"devices": ranks})
    parts = {key: getattr(entry, key) / ranks for key in ("memory", "bandwidth", "watts")}
    flops = {precision: peak / ranks for precision, peak in entry.flops.items()}
    return entry.model_copy(update={**parts, "flops": flops, "devices": ranks})


def _gpu_entry(hardware: Hardware) -> dict[str, Any]:
    gpu = min(hardware.gpus, key=lambda x: x.memory_bytes)  # all ranks must fit
    own = {"memory": gpu.memory_bytes, "host_memory": hardware.memory_bytes}
    if (name := known().find("devices", gpu.name)) is not None:
        return known().device(name) | own
    import torch

    about = torch.cuda.get_device_properties(hardware.gpus.index(gpu))
    capability = gpu.compute_capability or (7, 0)
    least = min(_MULTIPROCESSOR)
    known_as = max((c for c in _MULTIPROCESSOR if c <= capability), default=least)
    single, half = (x * about.multi_processor_count for x in _MULTIPROCESSOR[known_as])
    clock = about.clock_rate * 1e3
    half //= 2 if "GeForce" in gpu.name and capability >= (8, 6) else 1
    flops = {"fp32": single * clock, "fp16": half * clock}
    if capability >= (8, 0):
        flops |= {"bf16": half * clock, "tf32": half * clock / 2}
    if capability >= (8, 9):
        flops["fp8"] = 2 * half * clock
    return own | {
        "name": gpu.name,
        "node": "PCIe 4 server",
        "bandwidth": 2 * about.memory_clock_rate * 1e3 * about.memory_bus_width / 8,
        "flops": flops,
        "watts": _GPU_WATTS,
        "compute_capability": capability,
        "source": "estimated from clock, multiprocessors and bus",
    }


def _processors(hardware: Hardware) -> dict[str, Any]:
    told = psutil.cpu_freq()
    clock = max(told.max, told.current) * 1e6 if told else _CLOCK
    peaks = {}
    for precision, ways in _CORE.items():
        found = [n for feature, n in ways if not feature or feature in hardware.cpu_features]
        if found:
            peaks[precision] = max(found) * clock * hardware.cores
    bandwidth = min(_CORE_BANDWIDTH * hardware.cores, _BANDWIDTH)
    return {
        "name": hardware.cpu,
        "kind": "cpu",
        "node": "desktop",
        "memory": hardware.memory_bytes,
        "bandwidth": bandwidth,
        "flops": peaks,
        "watts": _CORE_WATTS * hardware.cores,
        "host_memory": hardware.memory_bytes,
        "host_bandwidth": bandwidth,
        "source": "estimated from cores, clock and instructions",
    }


def _measured(values: dict[str, Any], ranks: int, gpu: bool) -> dict[str, Any]:
    """What the catalogue's keys are by a calibration. A GPU keeps its maker's peaks: what share
    of them is reached is another figure, and MFU is of them."""
    found: dict[str, Any] = {}
    if not gpu and {"flops", "bandwidth"} <= values.keys():
        found = {"flops": values["flops"], "bandwidth": values["bandwidth"], "source": "measured"}
        found["host_bandwidth"] = values["bandwidth"]
    if links := values.get("links"):  # by number of ranks
        nearest = min(links, key=lambda count: (abs(int(count) - ranks), int(count)))
        found["link"] = {"name": "measured", **links[nearest]}
    if (reading := values.get("disk", {}).get("read")) is not None:
        found["nvme_bandwidth"] = reading
    return found


def calibration_path() -> Path:
    """Where the figures that were measured on this machine are kept."""
    folder = os.environ.get("ROSTRA_CACHE") or "~/.cache/rostra"
    return Path(folder).expanduser() / "calibration.json"


def save_calibration(values: dict[str, Any]) -> Path:
    """Keep `values` (of JSON) as those of this machine. `this_cluster` takes of them `flops` (a
    second, by precision), `bandwidth` (of memory), `links` (`bandwidth` and `latency` by number
    of ranks) and `disk` (`read`), in bytes and seconds."""
    path = calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    content = {"machine": _identity(probe()), "values": values}
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def load_calibration(
    hardware: Hardware | None = None, notice: Tell | None = None
) -> dict[str, Any] | None:
    """What was saved on this machine, or None: nothing, or on a machine that differs in
    processors, GPUs or version of torch, which `notice` is told."""
    path = calibration_path()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        then, values = dict(content["machine"]), dict(content["values"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _tell(notice, f"{path}: cannot be read as a calibration ({error}); run `rostra calibrate`")
        return None
    now = _identity(hardware or probe())
    if changed := [f"{k} was {then.get(k)}, is {now[k]}" for k in now if then.get(k) != now[k]]:
        why = "; ".join(changed)
        _tell(notice, f"{path}: of another machine ({why}); run `rostra calibrate` to use one")
        return None
    return values


def _identity(hardware: Hardware) -> dict[str, Any]:
    return {
        "cpu": hardware.cpu,
        "cores": hardware.cores,
        "gpus": [gpu.name for gpu in hardware.gpus],
        "torch": hardware.versions.get("torch"),
    }


def _tell(notice: Tell | None, message: str) -> None:
    if notice is not None:
        notice(message)
