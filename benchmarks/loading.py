"""Tokens a second of loaders, side by side: Rostra, MosaicML Streaming and WebDataset.

    python benchmarks/loading.py [--json] [--rounds 5] [--samples 8192]

The same random tokens, of documents of about 1,000 tokens, written by each project's own writer
and read in random order as batches of 8 samples of 2,048 tokens: by one process without workers,
from shards in the file system's cache, after one warm-up pass. The loaders take turns, and the
median of the rounds counts. Seconds are those of the processor (all threads of the process), which
other work on the machine changes least.

- `rostra`: input_ids, labels and position_ids, documents isolated; shuffled over the whole epoch.
  `rostra (window)` with `data.load.shuffle: window`, and `rostra (read ahead)` with the default
  thread, which has nothing to win where nobody computes meanwhile.
- `streaming`: MDS shards with a column `ndarray:uint16:2048`, StreamingDataset with shuffle and its
  other defaults, in torch's DataLoader. It gives the tokens alone.
- `webdataset`: tar shards of .npy members, shardshuffle and a shuffle buffer of 1,000, in its
  WebLoader. It gives the tokens alone.

torchvision, which MosaicML Streaming imports for its vision datasets alone, may be missing.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from rostra.config.loading import LoadTable
from rostra.data import Loader, ReadAhead
from rostra.data.prepared import PreparedFiles
from rostra.data.samples import Samples
from rostra.data.shards import Shards
from rostra.data.writer import ShardWriter
from rostra.store import secure_file

LENGTH, BATCH = 2048, 8
SHARD_TOKENS = 1 << 22
Passes = Callable[[], Iterator[torch.Tensor]]  # of all batches, once


def documents(samples: int) -> Iterator[np.ndarray]:
    """Documents with so many samples in them and the token after the last."""
    random = np.random.default_rng(0)
    left = samples * LENGTH + 1
    while left:
        size = min(left, int(random.integers(200, 1800)))
        yield random.integers(0, 50_000, size).astype(np.uint16)
        left -= size


def rostra(folder: Path, samples: int, shuffle: str = "global", ahead: int = 0) -> Passes:
    writer = ShardWriter(folder, "train", np.uint16, SHARD_TOKENS, keep_text=False)
    for number, tokens in enumerate(documents(samples)):
        writer.add(str(number), "", tokens, len(tokens))
    writer.close()
    sums = {shard.file: secure_file(folder / shard.file) for shard in writer.closed}
    shards = Shards(writer.closed, PreparedFiles(folder, sums).shard)
    load = LoadTable.model_validate({"shuffle": shuffle, "window": 1024})
    loader = ReadAhead(Loader(Samples(shards, LENGTH, 0, True, load), BATCH), ahead)

    def once() -> Iterator[torch.Tensor]:
        for first in range(0, samples, BATCH):
            yield loader.batch(first, BATCH).input_ids

    return once


def run(samples: int) -> np.ndarray:
    """All tokens as samples: [samples, LENGTH]."""
    return np.concatenate(list(documents(samples)))[:-1].reshape(-1, LENGTH)


def streaming(folder: Path, samples: int) -> Passes:
    _stand_in_for_torchvision()
    from streaming import MDSWriter, StreamingDataset

    columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=2 * SHARD_TOKENS) as writer:
        for sample in run(samples):
            writer.write({"tokens": sample})
    dataset = StreamingDataset(local=str(folder), batch_size=BATCH, shuffle=True)
    loader: Any = DataLoader(dataset, batch_size=BATCH)
    return lambda: (batch["tokens"] for batch in loader)


def webdataset(folder: Path, samples: int) -> Passes:
    import webdataset as wds

    with wds.ShardWriter(f"{folder}/%05d.tar", maxsize=2 * SHARD_TOKENS, verbose=0) as writer:
        for number, sample in enumerate(run(samples)):
            writer.write({"__key__": f"{number:08d}", "npy": sample})
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    dataset = wds.WebDataset(urls, shardshuffle=len(urls)).shuffle(1000).decode().to_tuple("npy")
    loader: Any = wds.WebLoader(dataset.batched(BATCH), batch_size=None)
    return lambda: (torch.as_tensor(batch[0]) for batch in loader)


def _stand_in_for_torchvision() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        return

    class StandIn(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for part in ("", ".datasets", ".transforms", ".transforms.functional"):
        name = f"torchvision{part}"
        sys.modules[name] = module = StandIn(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)


def tokens_per_second(once: Passes, samples: int) -> float:
    began = time.process_time()
    seen = sum(batch.numel() for batch in once())
    seconds = time.process_time() - began
    assert seen == samples * LENGTH, (seen, samples * LENGTH)
    return seen / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8192)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = arguments.samples
    makers: dict[str, Callable[[Path], Passes]] = {
        "rostra": lambda folder: rostra(folder, samples),
        "rostra (window)": lambda folder: rostra(folder, samples, "window"),
        "rostra (read ahead)": lambda folder: rostra(folder, samples, ahead=2),
        "streaming": lambda folder: streaming(folder, samples),
        "webdataset": lambda folder: webdataset(folder, samples),
    }
    with tempfile.TemporaryDirectory() as root:
        passes: dict[str, Passes] = {}
        for number, (name, make) in enumerate(makers.items()):
            folder = Path(root, str(number))
            folder.mkdir()
            passes[name] = make(folder)
            tokens_per_second(passes[name], samples)  # warm
        found = {name: [tokens_per_second(once, samples)] for name, once in passes.items()}
        for _ in range(arguments.rounds - 1):
            for name, once in passes.items():
                found[name].append(tokens_per_second(once, samples))
    speeds = {name: statistics.median(speeds) for name, speeds in found.items()}
    if arguments.json:
        print(json.dumps({"tokens_per_second": speeds, "rounds": found}))
        return
    print("| loader | million tokens/s | lowest to highest |\n|---|---|---|")
    for name, speed in speeds.items():
        low, high = min(found[name]) / 1e6, max(found[name]) / 1e6
        print(f"| {name} | {speed / 1e6:.1f} | {low:.1f} to {high:.1f} |")


if __name__ == "__main__":
    main()
