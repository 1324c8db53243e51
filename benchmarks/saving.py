"""What saving a checkpoint and going on from it take beside the state: memory, processor time.

    python benchmarks/saving.py [--json] [--only NAME ...]

A Llama of 60 million parameters takes two steps in a fresh process, saves, and loads what it
saved. `save` and `load` are the most that the process held meanwhile beyond what it held before
(its own pages, every 2 ms; mapped files belong to the page cache), `file` and `seconds` the
checkpoint's bytes and the processor time of saving. On a GPU the state is there, and comes
through the host a few megabytes at a time; here it is on the host, or on disk as on NVMe.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STATES: dict[str, dict[str, Any]] = {
    "one process": {},
    "bf16_pure": {"compute": "bf16_pure"},
    "int8 states": {"optimizer_states": "int8"},
    "deepspeed zero3": {"engine": "deepspeed", "sharding": "full_shard"},
    "deepspeed zero3, states on NVMe": {
        "engine": "deepspeed",
        "sharding": "full_shard",
        "offload_optimizer": "nvme",
    },
}
LENGTH, SAMPLES = 64, 2


def own_pages() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@contextmanager
def more() -> Iterator[list[int]]:
    """The most bytes beyond those of the beginning, at the end."""
    before, done, found = own_pages(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.002):
            found[0] = max(found[0], own_pages() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    yield found
    done.set()
    thread.join()


def measured(name: str, folder: Path) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig

    from rostra.batch import Batch
    from rostra.build import build_engine
    from rostra.checkpoint import Position, open_checkpoint, save_checkpoint
    from rostra.config import config_from_dict
    from rostra.events import Events
    from rostra.layout import Layout
    from rostra.models import SeededWeights, model_on_meta
    from rostra.store import RunFolder
    from rostra.train import train_step

    (folder / "nvme").mkdir()
    nvme = {"path": str(folder / "nvme")}
    config = config_from_dict(
        {
            "model": {"preset": "tiny"},
            "data": {
                "sources": [{"type": "python_docs"}],
                "tokenizer": {"vocabulary": 8192},
                "sequence_length": LENGTH,
            },
            "train": {"steps": 10, "global_batch_size": SAMPLES},
            "memory": {"offload": nvme},
        }
    )
    shape = LlamaConfig(
        vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=7,
        num_attention_heads=12, num_key_value_heads=12, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    layout = Layout(SAMPLES, 1, **STATES[name])
    cpu, weights = torch.device("cpu"), SeededWeights(shape, 1)
    engine = build_engine(config, layout, model_on_meta(shape), cpu, 10, Events(), weights)
    del weights
    ids = torch.randint(0, 8192, (SAMPLES, LENGTH))
    batch = Batch(ids, ids.clone(), torch.arange(LENGTH).repeat(SAMPLES, 1))
    for _ in range(2):
        train_step(engine, batch)
    began = time.process_time()
    with more() as saving:
        position = Position(2, 4, 4 * LENGTH)
        path = save_checkpoint(RunFolder(folder / "run"), engine, position, layout, {}, {})
    seconds = time.process_time() - began
    size = sum(file.stat().st_size for file in path.iterdir())
    with more() as loading:
        open_checkpoint(path).restore(engine)
    engine.close()
    return {"file": size, "save": saving[0], "seconds": seconds, "load": loading[0]}


def apart(name: str) -> dict[str, Any]:
    """In a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--measure", name, folder]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(STATES))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        name, folder = asked.measure
        print(json.dumps(measured(name, Path(folder))))
        return
    rows = {name: apart(name) for name in asked.only}
    if asked.json:
        print(json.dumps(rows))
        return
    print("| state | checkpoint, MB | save, MB | save, s | load, MB |\n|---|---|---|---|---|")
    for name, row in rows.items():
        figures = [f"{row[key] / 1e6:.0f}" for key in ("file", "save", "load")]
        print(f"| {name} | {figures[0]} | {figures[1]} | {row['seconds']:.1f} | {figures[2]} |")


if __name__ == "__main__":
    main()
