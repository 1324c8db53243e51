"""The engine `slurm`: tasks as the elements of an array of Slurm jobs.

All nodes need the same Python environment and, under the same path, the sources and
`data.cache`. An element that is requeued or sent again passes over what is complete; tasks of
elements that were killed are submitted again.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from rostra.config.preparing import SlurmTable
from rostra.data.engines.afar import complete_afar, forget_failure, incomplete
from rostra.data.engines.element import array_name, describe
from rostra.data.folders import LocalFolder, write_json
from rostra.data.tasks import Do, Task, Tell, complete_tasks
from rostra.errors import RequestError

TRIES = 3  # of what elements left that were killed
SHOWN = 8  # elements that a message names


class SlurmEngine:
    """Does tasks by an array of Slurm jobs, which it submits and waits for."""

    def __init__(self, table: SlurmTable, say: Callable[[str], None]) -> None:
        self._table, self._say = table, say

    def run(self, tasks: Sequence[Task], do: Do, tell: Tell) -> Generator[Task, None, None]:
        if not tasks:
            return
        forget_failure(do)
        if not self._table.submit:
            self._write(do, tasks)
            self._say(f"submit {do.work.place}/{do.stage}.sh with sbatch; waiting for its tasks")
            yield from complete_afar(tasks, do, tell, lambda: None, self._table.poll_seconds)
            return
        missing = tasks
        for attempt in range(1, TRIES + 1):
            why = yield from self._submitted(missing, do, tell)
            done = complete_tasks(do.work, do.stage, missing)
            missing = [task for task in missing if task.number not in done]
            if not missing:
                return
            if attempt < TRIES:
                self._say(f"{why}; submitting the {len(missing):,} tasks that are left")
        raise incomplete(f"{why}, as did {TRIES - 1} before it", do, tasks)

    def _submitted(self, tasks: Sequence[Task], do: Do, tell: Tell) -> Generator[Task, None, str]:
        """Do tasks by one array; why it ended, if not all are complete then."""
        script, count = self._write(do, tasks)
        job = _slurm(["sbatch", "--parsable"], script).split(";")[0].strip()
        self._say(f"submitted as Slurm job {job}: {count} elements for {len(tasks):,} tasks")
        seconds = self._table.poll_seconds
        try:
            return (yield from complete_afar(tasks, do, tell, lambda: _ended(job), seconds))
        finally:
            subprocess.run(["scancel", job], capture_output=True, check=False)

    def _write(self, do: Do, tasks: Sequence[Task]) -> tuple[str, int]:
        """The array's script, written with what its elements must know; and their count."""
        count = min(self._table.elements, len(tasks))
        elements = [tasks[first::count] for first in range(count)]
        write_json(do.work, array_name(do.stage), describe(do, elements))
        script = self._script(do, count)
        do.work.write(f"{do.stage}.sh", script.encode())
        return script, count

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
    return f"Slurm job {job} has ended ({_failures(job)}; see its logs)"


def _failures(job: str) -> str:
    """Which elements did not end well, and how: as long as Slurm remembers them."""
    command = ["scontrol", "--oneliner", "show", "job", job]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in told.splitlines()]
    failed = [
        f"element {row.get('ArrayTaskId', '?')} on {row.get('NodeList', '?')}: "
        f"{row['JobState']}, exit code {row.get('ExitCode', '?')}"
        for row in rows
        if row.get("JobState", "COMPLETED") != "COMPLETED"
    ]
    more = [f"{len(failed) - SHOWN:,} more"] if len(failed) > SHOWN else []
    return "; ".join([*failed[:SHOWN], *more]) or "no element is known to have failed"


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
