"""Going on in the middle of an epoch of 10 billion tokens: seconds, and memory.

    python benchmarks/resume.py [--json] [--tokens 1e10] [--rounds 5]

The prepared data is sparse: its manifest has 1,192 shards of 8.4 million tokens (what a task of
`data.prepare.task_bytes` gives) in four sources, each with its own name and hash, and all names
are links to one file, so that it takes 17 MB of disk. A fresh process imports everything, then
is measured from reading the manifest to the first batch (8 samples of 2,048 tokens) in the
middle of the second epoch, under each way to fill and to order samples. A shard is hashed
before its tokens are used: a batch that is spread over 8 shards has 8 of them to hash, which is
most of the time. `memory` is what the process holds more than before (its own pages; those of
mapped files belong to the page cache).

Rows of whole documents (best_fit) are made once for the data, before; that is `first_seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rostra.config.data import DataSection
from rostra.data import open_prepared, training_loader
from rostra.data.prepared import FORMAT, TOKENIZER, seal
from rostra.data.tokenizer import train_tokenizer
from rostra.data.writer import ShardWriter
from rostra.store import MANIFEST, secure_file, write_json

SHARD = 1 << 23
SOURCES = 4
LENGTH, BATCH = 2048, 8
WAYS: dict[str, dict[str, Any]] = {
    "concatenate": {},
    "concatenate, windows": {"load": {"shuffle": "window"}},
    "best_fit": {"packing": "best_fit"},
    "best_fit, windows": {"packing": "best_fit", "load": {"shuffle": "window"}},
}


def sparse(folder: Path, tokens: int) -> None:
    """Prepared data of so many tokens, with documents of 100 to 1,900."""
    count = max(SOURCES, tokens // SHARD)
    writer = ShardWriter(folder, "train", np.uint16, SHARD, keep_text=False)
    random = np.random.default_rng(0)
    while not writer.closed:
        length = int(random.integers(100, 1900))
        writer.add("document", "", random.integers(0, 256, length).astype(np.uint16), length)
    one = writer.closed[0]
    record = secure_file(folder / one.file)
    shards, files = [], {}
    for number in range(count):
        name = f"shard-{number:05d}.arrow"
        os.link(folder / one.file, folder / name)
        shards.append({**vars(one), "file": name, "source": number * SOURCES // count})
        files[name] = record
    train_tokenizer(iter(()), 257).save_pretrained(folder / TOKENIZER)
    for path in (folder / TOKENIZER).iterdir():
        files[f"{TOKENIZER}/{path.name}"] = secure_file(path)
    manifest = {
        "format": FORMAT,
        "key": "sparse",
        "tokenizer": {"hash": "", "vocabulary_size": 257},
        "skipped": {"counts": {}},
        "shards": {"train": shards, "held_out": []},
    }
    write_json(folder / MANIFEST, {"prepared": seal(manifest), "files": files})


def own_bytes() -> int:
    """Memory of this process alone."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def go_on(folder: Path, way: str) -> dict[str, float]:
    """In this process: from the manifest to a batch in the middle of the second epoch."""
    weights = [8, 4, 2, 1]
    sources = [{"type": "text", "path": "none", "weight": weight} for weight in weights]
    values = {"sources": sources, "sequence_length": LENGTH, **WAYS[way]}
    data = DataSection.model_validate(values)
    memory, began, cpu = own_bytes(), time.perf_counter(), time.process_time()
    prepared = open_prepared(folder)
    assert prepared is not None
    loader = training_loader(prepared, data, 0, BATCH, True, 0, print)
    samples = prepared.train.tokens // LENGTH
    state = loader.state(samples * 3 // 2)
    loader.resume(state, samples * 3 // 2)
    ready = time.perf_counter() - began
    batch = loader.batch(samples * 3 // 2, BATCH)
    assert len(batch) == BATCH
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "ready_seconds": ready,
        "memory": own_bytes() - memory,
    }


def measured(folder: Path, way: str) -> dict[str, float]:
    """The like in a fresh process."""
    command = [sys.executable, __file__, "--go-on", str(folder), way]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=float, default=1e10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--go-on", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.go_on:
        print(json.dumps(go_on(Path(asked.go_on[0]), asked.go_on[1])))
        return
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        sparse(Path(name), int(asked.tokens))
        for way in WAYS:
            first = measured(Path(name), way)["ready_seconds"]
            rounds = [measured(Path(name), way) for _ in range(asked.rounds)]
            medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            results[way] = {**medians, "first_seconds": first}
            if not asked.json:
                show(way, results[way])
    if asked.json:
        print(json.dumps(results, indent=2))


def show(way: str, found: dict[str, float]) -> None:
    print(
        f"{way:<22} {found['seconds']:.3f} s ({found['cpu_seconds']:.3f} s of a processor, "
        f"{found['ready_seconds']:.3f} s before the first batch; {found['first_seconds']:.1f} s "
        f"the first time), {found['memory'] / 1e6:.1f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
