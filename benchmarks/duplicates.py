"""Finding duplicates beside the peers: MinHash signatures a second, and what they find.

    python benchmarks/duplicates.py speed DATA… [--rounds 5] [--repeat 2] [--json]
    python benchmarks/duplicates.py found DATA… [--json]
    python benchmarks/duplicates.py clusters [--documents 10000000] [--json]

DATA are .jsonl files (a document a line, under `text`) and .txt files or folders of them (cut
into pages of 300 words).

speed: documents a second on one core, of 14 bands of 8 hashes over 5-grams of words, beside
datatrove's MinhashDedupSignature (its own shingles and signature, as it comes: words by spaCy; and
with words split at spaces) and datasketch's MinHash.bulk with its quickest hash and scheme. All
are in one process on one thread and take turns; seconds are of the CPU, and the median over the
rounds counts. datatrove needs spaCy, and xxhash before version 4.

found: near duplicates are planted with words exchanged at random, and their similarity is
counted from the sets of 5-grams. By similarity: the share that was found, beside the formula's.
And of all pairs of documents that were found, planted or not: how many are as similar as 0.5.

clusters: seconds of the CPU and peak memory for random signatures, of which a fifth are duplicates.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from rostra.data.duplicates import MinHash, duplicates

PAGE_WORDS = 300
BATCH = 1024
Sign = Callable[[Sequence[str]], object]


def documents(paths: list[Path]) -> list[str]:
    """The documents and pages of all files."""
    texts = []
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    for path in sorted(files):
        if path.suffix == ".jsonl":
            texts += [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]
        elif path.suffix == ".txt":
            encoding = "latin-1" if path.stem.endswith("-8") else "utf-8"
            words = path.read_text(encoding).split(" ")
            texts += [
                " ".join(words[at : at + PAGE_WORDS]) for at in range(0, len(words), PAGE_WORDS)
            ]
    return texts


def rostra() -> Sign:
    minhash = MinHash()
    minhash.signatures(["make the tables that are made on first use"])

    def sign(texts: Sequence[str]) -> None:
        for at in range(0, len(texts), BATCH):
            minhash.signatures(texts[at : at + BATCH])

    return sign


def datatrove(spaces: bool) -> Sign:
    import tempfile

    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature
    from datatrove.utils.word_tokenizers import WhitespaceTokenizer

    class Spaces(WhitespaceTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

    step = MinhashDedupSignature(tempfile.mkdtemp())
    if spaces:
        step.word_tokenizer = Spaces()
    step.get_shingles("load what is loaded on first use")

    def sign(texts: Sequence[str]) -> None:
        for text in texts:
            if (shingles := step.get_shingles(text)).size:
                step.get_signature(shingles)

    return sign


def datasketch() -> Sign:
    import xxhash
    from datasketch import MinHash as Sketch

    words = re.compile(r"\w+").findall

    def grams(text: str) -> set[bytes]:
        found = words(text.lower())
        return {" ".join(found[at : at + 5]).encode() for at in range(max(len(found) - 4, 1))}

    def sign(texts: Sequence[str]) -> None:
        Sketch.bulk([grams(text) for text in texts], num_perm=112, hashfunc=xxhash.xxh32_intdigest)

    return sign


CONTENDERS: dict[str, Callable[[], Sign]] = {
    "rostra": rostra,
    "datatrove": lambda: datatrove(spaces=False),
    "datatrove, words at spaces": lambda: datatrove(spaces=True),
    "datasketch": datasketch,
}


def speed(texts: list[str], rounds: int) -> dict[str, Any]:
    signs = {name: make() for name, make in CONTENDERS.items()}
    seen: dict[str, list[float]] = {name: [] for name in signs}
    for number in range(rounds):
        for name, sign in signs.items():
            began = time.process_time()
            sign(texts)
            seen[name].append(len(texts) / (time.process_time() - began))
            print(f"round {number}: {name} {seen[name][-1]:,.0f} documents/s", file=sys.stderr)
    rates = {name: statistics.median(each) for name, each in seen.items()}
    return {
        "documents": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "documents_per_second": rates,
        "times_datatrove": rates["rostra"] / rates["datatrove"],
    }


def found(texts: list[str]) -> dict[str, Any]:
    """What is found of planted near duplicates, and what else."""
    rng = np.random.default_rng(0)
    texts = list(dict.fromkeys(texts))
    planted = [_changed(text, share, rng) for text in texts for share in rng.uniform(0, 0.15, 4)]
    everything = texts + planted
    sets = [_shingles(text) for text in everything]
    signatures = MinHash().signatures(everything)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for place in range(len(planted)):
        one, other = place // 4, len(texts) + place
        hit = bool((signatures[one] == signatures[other]).any())
        similarity = _jaccard(sets[one], sets[other])
        bins.setdefault(min(int(similarity * 10), 9), []).append((similarity, hit))
    candidates = [_jaccard(sets[a], sets[b]) for a, b in _pairs(signatures)]
    return {
        "by_similarity": {
            f"{tenth / 10:.1f}": {
                "pairs": len(pairs),
                "found": statistics.mean(hit for _, hit in pairs),
                "formula": statistics.mean(1 - (1 - s**8) ** 14 for s, _ in pairs),
            }
            for tenth, pairs in sorted(bins.items())
        },
        "pairs_found": len(candidates),
        "as_similar_as_0.5": statistics.mean(s >= 0.5 for s in candidates),
        "as_similar_as_0.3": statistics.mean(s >= 0.3 for s in candidates),
    }


def _changed(text: str, share: float, rng: np.random.Generator) -> str:
    words = text.split(" ")
    for place in np.flatnonzero(rng.random(len(words)) < share):
        words[place] = f"x{rng.integers(1 << 30)}"
    return " ".join(words)


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[^\W_]+", text.lower())
    return {tuple(words[at : at + 5]) for at in range(max(len(words) - 4, 1))}


def _jaccard(one: set[Any], other: set[Any]) -> float:
    return len(one & other) / len(one | other)


def _pairs(signatures: np.ndarray) -> set[tuple[int, int]]:
    """All pairs that share a band."""
    pairs = set()
    for band in signatures.T:
        order = np.argsort(band, kind="stable")
        cuts = np.flatnonzero(np.diff(band[order])) + 1
        for group in np.split(order, cuts):
            members = group.tolist()
            pairs |= {(a, b) for at, a in enumerate(members) for b in members[at + 1 :]}
    return pairs


def clusters(count: int) -> dict[str, Any]:
    """Seconds and memory for `count` documents, of which a fifth are copies of others."""
    rng = np.random.default_rng(0)
    content = rng.integers(0, 1 << 64, (count, 2), np.uint64)
    names = rng.integers(0, 1 << 64, count, np.uint64)
    copies = rng.integers(0, count, (2, count // 5))
    making = 0.0

    def bands() -> Iterator[np.ndarray]:
        nonlocal making
        for _ in range(14):
            began = time.process_time()
            band = rng.integers(0, 1 << 64, count, np.uint64)
            band[copies[0]] = band[copies[1]]
            making += time.process_time() - began
            yield band

    began = time.process_time()
    dropped = duplicates(content, names, bands())
    return {
        "documents": count,
        "dropped": int(dropped.sum()),
        "seconds": time.process_time() - began - making,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("speed", "found", "clusters"))
    parser.add_argument("data", type=Path, nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.task == "clusters":
        answer = clusters(asked.documents)
    elif asked.task == "found":
        answer = found(documents(asked.data))
    else:
        answer = speed(documents(asked.data) * asked.repeat, asked.rounds)
    if asked.json:
        print(json.dumps(answer, indent=2))
        return
    for name, value in answer.items():
        print(f"{name:25} {json.dumps(value)}")


if __name__ == "__main__":
    main()
