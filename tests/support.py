"""What tests share beside fixtures."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from rostra.cli import main

REPOSITORY = Path(__file__).parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"  # not there for everybody
Done = subprocess.CompletedProcess[str]

# DeepSpeed's JSON for ZeRO-3 with offloading, as its guides have it.
GUIDE = """# ds_config.json
{
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": 5e8,
    "offload_optimizer": {"device": "cpu"},  # ZeRO-Infinity
    "offload_param": {"device": "cpu"}
  },
  "bf16": {"enabled": true},
  "gradient_clipping": 1.0,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8
}
"""


def need(found: object, what: str) -> None:
    """Skip when something is not installed; fail where ROSTRA_TEST_ALL says all must run."""
    if found:
        return
    if os.environ.get("ROSTRA_TEST_ALL"):
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed")


def tiny_run(corpus: Path, output: Path, **sections: Any) -> dict[str, Any]:
    """A config of a run that takes seconds; keyword arguments replace keys of a section, or,
    where they are no table, the section."""
    values: dict[str, Any] = {
        "run": {"name": "tiny", "output": str(output)},
        "model": {"preset": "tiny"},
        "data": {
            "sources": [{"type": "text", "path": str(corpus)}],
            "tokenizer": {"vocabulary": 300},
            "sequence_length": 32,
            "held_out": 0.2,
        },
        "train": {"steps": 6, "global_batch_size": 4, "compile": False},
        "precision": {"compute": "fp32"},
        "monitor": {"tensorboard": False},
    }
    for name, found in sections.items():
        values[name] = {**values.get(name, {}), **found} if isinstance(found, dict) else found
    return values


def rostra(*arguments: str | Path, cwd: Path | None = None) -> Done:
    """The command in this process, where everything is imported: its exit code and output."""
    out, err = io.StringIO(), io.StringIO()
    command = ["rostra", *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", command)
        patch.setenv("COLUMNS", "200")
        patch.chdir(cwd or Path.cwd())
        with pytest.raises(SystemExit) as left:
            main()
    return Done(command, left.value.code or 0, out.getvalue(), err.getvalue())


def start(
    *arguments: str | Path, launcher: tuple[str, ...] = (), cwd: Path | None = None
) -> subprocess.Popen[str]:
    """The command as a process of its own, which takes seconds to import everything."""
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "rostra.cli", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )


def ended(process: subprocess.Popen[str]) -> Done:
    """What it has said, once it has ended."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()  # its ranks go with it
    return Done(process.args, process.returncode, out, err)


def refused(done: Done, *said: str) -> None:
    """Exit code 2, one message that holds what is to be said, and nothing on standard output."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("rostra: ") == 1, done.stderr
    for words in said:
        assert words in done.stderr


def wait_for_steps(folder: Path, process: subprocess.Popen[str], steps: int) -> None:
    """Until the run in `folder` has told of so many steps in all."""
    path = folder / "events.jsonl"
    while process.poll() is None:
        if path.exists() and path.read_text().count('"event": "step"') >= steps:
            return
        time.sleep(0.02)
    pytest.fail(f"ended early: {process.communicate()[1]}")
