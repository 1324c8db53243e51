"""How many layouts a second the planner looks at, on one core, and what it finds.

    python benchmarks/plan_search.py [--json]

Each row is a full search, in processor time: every layout decided, memory and time from the
planner's own models.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from rostra.hardware import read_cluster
from rostra.plan.planner import make_plan
from rostra.plan.request import Request

JOBS = (
    ("meta-llama/Meta-Llama-3-8B", "full", "8xH100"),
    ("meta-llama/Llama-2-70b", "qlora", "4xA100-80GB"),
    ("meta-llama/Llama-2-70b", "lora", "8xA100-80GB"),
    ("mistralai/Mistral-7B-v0.1", "full", "4x8xL4"),
    ("meta-llama/Meta-Llama-3-70B", "full", "64x8xH100"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    rows = [row(*job) for job in JOBS]
    if parser.parse_args().json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(*rows[0])
    for found in rows:
        table.add_row(*(f"{x:,.1f}" if isinstance(x, float) else str(x) for x in found.values()))
    Console().print(table)


def row(model: str, method: Any, hardware: str) -> dict[str, Any]:
    cluster = read_cluster(hardware)
    job, _ = Request(model=model, method=method).job(None, cluster.devices)
    began = time.process_time()
    plan = make_plan(job, cluster)
    seconds = time.process_time() - began
    return {
        "model": model,
        "method": method,
        "hardware": hardware,
        "layouts": plan.considered,
        "fitting": plan.found.fitting,
        "seconds": seconds,
        "layouts a second": plan.considered / seconds,
        "fastest": "none" if plan.chosen is None else plan.chosen.layout.describe(),
    }


if __name__ == "__main__":
    main()
