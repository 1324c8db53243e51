from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rostra.hardware import (
    NEEDS,
    best_device,
    can_compile,
    cpp_compiler,
    doctor,
    doctor_report,
    probe,
    python_headers,
    show_doctor,
    supports,
    usable_cores,
)
from rostra.hardware.probe import _memory_limit

CPU = torch.device("cpu")


def test_probe_tells_this_machine() -> None:
    found = probe()
    assert found.cpu
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert 0 < found.free_memory_bytes <= found.memory_bytes
    assert found.free_disk_bytes > 0
    assert found.versions["torch"] == torch.__version__
    assert len(found.gpus) == (torch.accelerator.device_count() if found.accelerator else 0)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux is not installed")
def test_cpu_features_are_those_of_the_kernel() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    found = probe().cpu_features
    for ours, kernels in (("avx512_bf16", "avx512_bf16"), ("amx_bf16", "amx_bf16")):
        assert (ours in found) == (kernels in flags)
    assert supports(CPU, "bf16") == ("avx512_bf16" in flags or "amx_bf16" in flags)


def test_float16_is_never_chosen_on_a_cpu() -> None:
    assert not supports(CPU, "fp16")


def test_limits_of_a_container_are_the_limits(tmp_path: Path) -> None:
    everything = usable_cores(tmp_path)  # no control groups there
    assert _memory_limit(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert usable_cores(tmp_path) == everything
    assert _memory_limit(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("5000\n")
    assert usable_cores(tmp_path) == 1
    assert _memory_limit(tmp_path) == (5000, 4000)


def test_affinity_is_a_limit() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("affinity is not installed")
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}}); "
        "from rostra.hardware import usable_cores; print(usable_cores())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "1"


def test_best_device_computes() -> None:
    device = best_device()
    assert float(torch.ones(2, device=device).sum()) == 2


def test_the_compiler_is_the_one_that_torch_will_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert cpp_compiler() is None
    assert not can_compile(CPU)
    ours = tmp_path / "c++ of ours"
    ours.write_text("#!/bin/sh\necho 'ours 1.0'\n")
    ours.chmod(0o755)
    monkeypatch.setenv("CXX", str(ours))
    assert cpp_compiler() == "ours 1.0"
    ours.write_text("#!/bin/sh\nexit 1\n")
    assert cpp_compiler() is None
    monkeypatch.delenv("CXX")
    assert (cpp_compiler() is not None) == (shutil.which("g++") is not None)


def test_headers_are_where_python_says() -> None:
    assert python_headers() in (None, sysconfig.get_paths()["include"])


def test_what_can_compile_compiles() -> None:
    if not can_compile(CPU):
        pytest.skip("a C++ compiler with Python headers is not installed")
    run = torch.compile(lambda x: x.sin() + 1)
    x = torch.ones(3)
    assert torch.allclose(run(x), x.sin() + 1)


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere")
    bare = replace(probe(), gpus=(), versions={})
    checks = {check.name: check for check in doctor(bare)}
    assert len(checks) == len(NEEDS)
    assert checks["GPU"].status == "optional"
    assert checks["C++ compiler"].status == "missing"
    assert "apt-get install g++" in checks["C++ compiler"].get
    assert checks["tensorboard"].status == "missing"
    full = {check.name: check for check in doctor(probe())}
    assert full["tensorboard"].status == "ok"
    assert full["tensorboard"].found


def test_doctor_is_shown_to_people_and_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(json.dumps(doctor_report()))
    assert set(report) == {"hardware", "checks"}
    show_doctor(report)
    text = capsys.readouterr().out
    for name in ("processor", "memory", *(need.name for need in NEEDS)):
        assert name in text


def test_importing_hardware_does_not_import_torch() -> None:
    code = "import sys, rostra.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
