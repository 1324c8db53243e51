"""Documents a second of each filter, beside datatrove's, on one core.

python benchmarks/cleaning.py PATH... [--page 4000] [--json]

PATH are JSON lines with a text each, or text files, which are cut into pages. Both do the same
decisions but for those that tests/data/test_clean_agreement.py explains. The best of three runs
counts, each by turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rostra.config.cleaning import CleanTable
from rostra.data.clean import Cleaner, Rejection

FILTERS = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
RUNS = 3


def read(paths: list[Path], page: int) -> list[str]:
    """The documents of all files."""
    found = []
    for path in paths:
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [json.loads(line)["text"] for line in lines]
        else:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [text[k : k + page] for k in range(0, len(text), page)]
    return found


def ours(*names: str) -> Callable[[str], bool]:
    """Whether all these filters keep a text."""
    clean = Cleaner.of(CleanTable(**{name: {} for name in names}), Path())
    return lambda text: not isinstance(clean(text, {}), Rejection)


def theirs(*names: str) -> Callable[[str], bool]:
    """The same by datatrove, whose memory of a text's words serves its next filter as well."""
    from datatrove.data import Document
    from datatrove.pipeline import filters

    known = {
        "gopher_quality": filters.GopherQualityFilter,
        "gopher_repetition": filters.GopherRepetitionFilter,
        "c4": filters.C4QualityFilter,
        "fineweb": filters.FineWebQualityFilter,
    }
    made = [known[name]() for name in names]
    for one in made:
        one.stat_update = lambda *_, **__: None  # what it counts is no part of the decision

    def keep(text: str) -> bool:
        document = Document(text=text, id="")
        return all(one.filter(document) is True for one in made)

    return keep


def measure(keep: Callable[[str], bool], texts: list[str]) -> tuple[float, int]:
    """Seconds for all texts, and how many are kept."""
    began = time.perf_counter()
    kept = sum(map(keep, texts))
    return time.perf_counter() - began, kept


def compare(names: tuple[str, ...], texts: list[str]) -> dict[str, Any]:
    """Both sides by turns; the words of texts are found anew in each run of theirs."""
    from datatrove.utils.text import split_into_parts

    best = {"ours": (float("inf"), 0), "theirs": (float("inf"), 0)}
    sides = {"ours": ours(*names), "theirs": theirs(*names)}
    for _ in range(RUNS):
        split_into_parts.cache_clear()
        for side, keep in sides.items():
            best[side] = min(best[side], measure(keep, texts))
    found: dict[str, Any] = {"filters": "+".join(names)}
    for side, (seconds, kept) in best.items():
        found |= {f"{side}_per_second": len(texts) / seconds, f"{side}_kept": kept}
    return found | {"times": found["ours_per_second"] / found["theirs_per_second"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--page", type=int, default=4000, help="characters of a page")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    texts = read(asked.paths, asked.page)
    rows = [compare(names, texts) for names in (*((name,) for name in FILTERS), FILTERS)]
    if asked.json:
        print(json.dumps({"documents": len(texts), "rows": rows}, indent=2))
        return
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB")
    for row in rows:
        print(
            f"{row['filters']}: {row['ours_per_second']:,.0f} documents/s, datatrove "
            f"{row['theirs_per_second']:,.0f}: {row['times']:.1f} times "
            f"(kept {row['ours_kept']:,} and {row['theirs_kept']:,})"
        )


if __name__ == "__main__":
    main()
