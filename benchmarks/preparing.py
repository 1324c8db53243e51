"""Preparation beside others, on one core each, in one run: MB/s and peak memory.

    python benchmarks/preparing.py TEXT [--megabytes 200] [--repeats 3] [--memory]

The corpus repeats TEXT, a file, in documents of about 3 KB, each with a first word of its own. All
use one tokenizer (byte-level BPE, trained on the same text). Rostra reads JSON lines, cleans
nothing, and writes shards; `raw` is the tokenizers library alone (encode_batch_fast of texts that
are in memory); `datasets` is datasets.map in batches; `datatrove` its tokenization pipeline. All in
one process; seconds are the processor's, which other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ONE_CORE = {
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
VOCABULARY = 8192


def make_corpus(path: Path, text: str, megabytes: float) -> None:
    """JSON lines with documents of about 3 KB, no two the same."""
    pieces = [text[start : start + 3000] for start in range(0, len(text), 3000)]
    written = number = 0
    with path.open("w") as file:
        while written < megabytes * 1e6:
            line = json.dumps({"text": f"n{number} {pieces[number % len(pieces)]}"}) + "\n"
            written += file.write(line)
            number += 1


def raw(corpus: Path, tokenizer: Path, out: Path) -> float:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    with corpus.open() as file:
        texts = [json.loads(line)["text"] for line in file]
    began = time.process_time()
    for start in range(0, len(texts), 1024):
        backend.encode_batch_fast(texts[start : start + 1024], add_special_tokens=False)
    return time.process_time() - began


def rostra(corpus: Path, tokenizer: Path, out: Path) -> float:
    from rostra.config.data import DataSection
    from rostra.data import prepare

    data = DataSection.model_validate(
        {
            "sources": [{"type": "jsonl", "path": str(corpus)}],
            "tokenizer": {"pretrained": str(tokenizer)},
            "cache": str(out),
            "prepare": {"engine": "process"},
        }
    )
    began = time.process_time()
    prepare(data, None, lambda _: None)
    return time.process_time() - began


def datasets(corpus: Path, tokenizer: Path, out: Path) -> float:
    import datasets as library
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(str(tokenizer))
    began = time.process_time()
    found = library.load_dataset(
        "json", data_files=str(corpus), split="train", cache_dir=str(out / "cache")
    )
    found = found.map(
        lambda rows: {"input_ids": own(rows["text"], return_attention_mask=False)["input_ids"]},
        batched=True,
        remove_columns=["text"],
    )
    found.save_to_disk(str(out / "saved"))
    return time.process_time() - began


def datatrove(corpus: Path, tokenizer: Path, out: Path) -> float:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    (out / "in").mkdir()
    (out / "in" / corpus.name).symlink_to(corpus)
    pipeline = [
        JsonlReader(str(out / "in")),
        DocumentTokenizer(
            str(out / "tokens"),
            tokenizer_name_or_path=str(tokenizer / "tokenizer.json"),
            eos_token="<|endoftext|>",
            shuffle_documents=False,
        ),
    ]
    began = time.process_time()
    LocalPipelineExecutor(pipeline, logging_dir=str(out / "logs")).run()
    return time.process_time() - began


WAYS = {way.__name__: way for way in (raw, rostra, datasets, datatrove)}


def measured(way: str, corpus: Path, tokenizer: Path, folder: Path) -> dict[str, float]:
    """Seconds and peak megabytes, in a process of its own."""
    command = [sys.executable, __file__, "--way", way, str(corpus), str(tokenizer), str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **ONE_CORE}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_way(way: str, corpus: str, tokenizer: str, folder: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as out:
        seconds = WAYS[way](Path(corpus), Path(tokenizer), Path(out))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_mb": peak}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="1x, 4x and 16x of a corpus instead")
    parser.add_argument("text", type=Path, nargs="?", help="a text file to repeat")
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        run_way(*options.way)
        return
    from rostra.data import train_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="preparing-"))
    try:
        text = options.text.read_text()
        tokenizer = folder / "tokenizer"
        train_tokenizer(iter([text]), VOCABULARY).save_pretrained(tokenizer)
        corpus = folder / "corpus.jsonl"
        if options.memory:
            for times in (1, 4, 16):
                make_corpus(corpus, text, options.megabytes / 16 * times)
                found = measured("rostra", corpus, tokenizer, folder)
                print(f"{times:3}x  {corpus.stat().st_size / 1e6:7.1f} MB  "
                      f"peak {found['peak_mb']:6.0f} MB", flush=True)  # fmt: skip
            return
        make_corpus(corpus, text, options.megabytes)
        size = corpus.stat().st_size / 1e6
        found_all: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):  # in turn, so that a busy moment hits all
            for way, found in found_all.items():
                found.append(measured(way, corpus, tokenizer, folder))
        base = statistics.median(one["seconds"] for one in found_all["raw"])
        for way, found in found_all.items():
            seconds = statistics.median(one["seconds"] for one in found)
            peak = max(one["peak_mb"] for one in found)
            print(f"{way:10} {size / seconds:6.2f} MB/s  {base / seconds:5.0%} of raw  "
                  f"peak {peak:6.0f} MB")  # fmt: skip
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
