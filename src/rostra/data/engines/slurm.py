"""The engine `slurm`: tasks as the elements of an array of Slurm jobs.

All nodes need the same Python environment and, under the same path, the sources and
`data.cache`. An element that is requeued or sent again passes over what is complete.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from rostra.config.preparing import SlurmTable
from rostra.data.engines.afar import complete_afar, forget_failure
from rostra.data.engines.element import array_name, describe
from rostra.data.folders import LocalFolder, write_json
from rostra.data.tasks import Do, Task, Tell
from rostra.errors import RequestError


class SlurmEngine:
    """Does tasks by an array of Slurm jobs, which it submits and waits for."""

    def __init__(self, table: SlurmTable, say: Callable[[str], None]) -> None:
        self._table, self._say = table, say

    def run(self, tasks: Sequence[Task], do: Do, tell: Tell) -> Generator[Task, None, None]:
        if not tasks:
            return
        forget_failure(do)
        count = min(self._table.elements, len(tasks))
        elements = [tasks[first::count] for first in range(count)]
        write_json(do.work, array_name(do.stage), describe(do, elements))
        script = self._script(do, count)
        do.work.write(f"{do.stage}.sh", script.encode())
        if not self._table.submit:
            self._say(f"submit {do.work.place}/{do.stage}.sh with sbatch; waiting for its tasks")
            yield from complete_afar(tasks, do, tell, lambda: None, self._table.poll_seconds)
            return
        job = _slurm(["sbatch", "--parsable"], script).split(";")[0].strip()
        self._say(f"submitted as Slurm job {job}: {count} elements for {len(tasks):,} tasks")
        try:
            yield from complete_afar(tasks, do, tell, lambda: _ended(job), self._table.poll_seconds)
        finally:
            subprocess.run(["scancel", job], capture_output=True, check=False)

    def _script(self, do: Do, elements: int) -> str:
        options = {
            "job-name": "rostra-prepare",
            "array": f"0-{elements - 1}",
            "chdir": str(Path.cwd()),
            "requeue": "",
            "cpus-per-task": "1",
            **self._table.options,
        }
        if isinstance(do.work, LocalFolder):
            options.setdefault("output", f"{do.work.place}/{do.stage}-%a.log")
        lines = [f"#SBATCH --{key}{'=' if value else ''}{value}" for key, value in options.items()]
        command = [sys.executable, "-m", "rostra.data.engines.element", do.work.place, do.stage]
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                "export RAYON_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
                *self._table.setup,
                f'exec {shlex.join(command)} "$SLURM_ARRAY_TASK_ID"',
                "",
            ]
        )


def _ended(job: str) -> str | None:
    """Why no element is left; None while some are queued or run."""
    listed = subprocess.run(
        ["squeue", "--noheader", "--jobs", job, "--format", "%i"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout.strip():
        return None
    if listed.returncode and "Invalid job id" not in listed.stderr:
        return None  # the controller does not answer; it may again
    return f"Slurm job {job} has ended (see its logs)"


def _slurm(command: list[str], script: str) -> str:
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RequestError(
            "data.prepare.engine: slurm needs sbatch, squeue and scancel on this machine. Start "
            "this where jobs are submitted, or set data.prepare.slurm.submit to false and have "
            "the script submitted by hand."
        ) from error
    if done.returncode:
        raise RequestError(f"sbatch refused the array: {done.stderr.strip()} (data.prepare.slurm)")
    return done.stdout
