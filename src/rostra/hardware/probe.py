"""What this machine has: processor, memory, GPUs, libraries, and what it is good for."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

if TYPE_CHECKING:
    import torch

_LIBRARIES = (
    "torch", "transformers", "tokenizers", "safetensors", "pyarrow", "fsspec", "pydantic", "numpy",
    "triton", "flash-attn", "tensorboard", "accelerate",
)  # fmt: skip
# Instructions that decide the speed of matrix products, under torch's names.
_CPU_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")
_GROUPS = Path("/sys/fs/cgroup")  # what a container may use, on Linux


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None  # of CUDA devices


@dataclass(frozen=True)
class Hardware:
    """What one process can use here; containers' limits are the limits."""

    cpu: str
    cpu_features: tuple[str, ...]
    cores: int
    memory_bytes: int
    free_memory_bytes: int
    free_disk_bytes: int  # where the process was started
    accelerator: str | None  # torch's name of the kind: cuda, xpu, mps
    gpus: tuple[Gpu, ...]
    python: str
    versions: dict[str, str]  # of the libraries that are installed

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe() -> Hardware:
    """Look at this machine now."""
    import torch

    memory = psutil.virtual_memory()
    limit = _memory_limit()
    total = memory.total if limit is None else min(memory.total, limit[0])
    free = memory.available if limit is None else min(memory.available, limit[1])
    capabilities = torch.cpu.get_capabilities()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return Hardware(
        cpu=str(capabilities.get("cpu_name") or platform.processor() or platform.machine()),
        cpu_features=tuple(name for name in _CPU_FEATURES if capabilities.get(name)),
        cores=usable_cores(),
        memory_bytes=total,
        free_memory_bytes=free,
        free_disk_bytes=shutil.disk_usage(Path.cwd()).free,
        accelerator=None if accelerator is None else accelerator.type,
        gpus=_gpus(accelerator),
        python=platform.python_version(),
        versions={name: v for name in _LIBRARIES if (v := _version(name)) is not None},
    )


def _gpus(accelerator: torch.device | None) -> tuple[Gpu, ...]:
    import torch

    if accelerator is None:
        return ()
    count = torch.accelerator.device_count()
    if accelerator.type == "cuda":
        found = [torch.cuda.get_device_properties(i) for i in range(count)]
        return tuple(Gpu(p.name, p.total_memory, (p.major, p.minor)) for p in found)
    if accelerator.type == "mps":  # shares the machine's memory; this much is advised
        return (Gpu("Apple GPU", torch.mps.recommended_max_memory(), None),)
    return tuple(Gpu(accelerator.type, 0, None) for _ in range(count))


def usable_cores(groups: Path = _GROUPS) -> int:
    """Cores that this process may run on: affinity, and a container's share of time."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota, _, period = (_control_group(groups / "cpu.max") or "max").partition(" ")
    return cores if quota == "max" else min(cores, max(1, math.ceil(int(quota) / int(period))))


def _memory_limit(groups: Path = _GROUPS) -> tuple[int, int] | None:
    """Bytes a container may hold, and how many of them are free (Linux control groups, v2)."""
    limit = _control_group(groups / "memory.max")
    used = _control_group(groups / "memory.current")
    if limit is None or used is None or limit == "max":
        return None
    return int(limit), max(0, int(limit) - int(used))


def _control_group(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def best_device() -> torch.device:
    """A CUDA device if there is one, else the CPU: Rostra has not been tried on others."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def supports(device: torch.device, precision: Literal["bf16", "fp16"]) -> bool:
    """Whether `device` computes `precision` faster than float32.

    CPU: bfloat16 with its own instructions, avx512_bf16 or AMX. With avx512_bf16, products of
    matrices were measured at 432 GFLOP/s against 200 in float32, and a 34M Llama trained 1.57
    times as fast; without, each product converts to float32 and back. float16 ran at 0.4.
    CUDA: bfloat16 from compute capability 8.0 (Ampere), float16 from 7.0 (tensor cores).
    """
    import torch

    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
        return precision == "bf16" and fast
    if device.type == "cuda" and torch.version.hip is None:
        least = (8, 0) if precision == "bf16" else (7, 0)
        return torch.cuda.get_device_capability(device) >= least
    return True


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile will call, found in its own way; None without one."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        ran = subprocess.run([name, "--version"], capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.decode(errors="replace").splitlines()[0] if ran.stdout else name


def python_headers() -> str | None:
    """The folder of Python.h, which compiled code includes; None where it is not installed."""
    folder = Path(sysconfig.get_paths()["include"])
    return str(folder) if (folder / "Python.h").is_file() else None


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has what it needs here for `device`."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None and supports(device, "fp16")
    return cpp_compiler() is not None and python_headers() is not None
