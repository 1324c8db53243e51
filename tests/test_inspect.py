from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from rostra import Run
from rostra.cli import app
from rostra.errors import RequestError
from support import SHARED_DATA

Tiny = Callable[..., dict[str, Any]]


def inspected(path: Path, values: dict[str, Any], *options: str) -> Result:
    (path / "run.yaml").write_text(json.dumps(values))
    done = CliRunner().invoke(app, ["inspect", str(path / "run.yaml"), *options])
    assert done.exception is None, done.output
    return done


def examples(path: Path, type: str, records: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    file = path / f"{type}.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return {"sources": [{"type": type, "path": str(file)}], "held_out": 0.0, **keys}


def test_examples_are_shown_with_how_they_are_packed(tiny: Tiny, tmp_path: Path) -> None:
    words = ["one two three", "seven", "a much longer answer than the others have, by far " * 9]
    records = [{"instruction": "Count.", "output": words[k % 3]} for k in range(12)]
    data = examples(tmp_path, "alpaca", [*records, {"output": "?"}], on_bad_record="skip")
    data |= {"sequence_length": 160, "prepare": {"shard_tokens": 100}}  # an example a shard
    done = inspected(tmp_path, tiny(data=data), "--examples", "2", "--json")
    found = json.loads(done.stdout)
    assert found["kind"] == "examples"
    assert found["train"]["examples"] == 12
    assert sum(found["skipped"].values()) == 1
    assert list(found["changed"].values()) == [4]
    assert "4 of 12 examples are longer than data.sequence_length (160): left out" in done.stderr
    assert 0 < found["padding"] == 1 - found["tokens"] / (found["samples"] * 160)
    assert sum(found["lengths"].values()) == 12
    assert len(found["first_samples"]) == 2
    for shown, answer in zip(found["shown"], words, strict=False):
        trained = [t for t, w in zip(shown["tokens"], shown["weights"], strict=True) if w]
        tokenizer = Run.open(tiny(data=data)).prepare(lambda _: None).tokenizer
        assert tokenizer.decode(trained, skip_special_tokens=True) == answer
        assert "Count." in shown["text"]
    assert len(found["shown"]) == 2
    run = Run.open(tiny(data=data)).inspect(12, lambda _: None)
    targets = sum(int((one.weights > 0).sum()) for one in run.shown)
    said = inspected(tmp_path, tiny(data=data)).stdout
    for words_ in ("padding", "best_fit", "12 examples", f"{targets:,} targets", "⟦", "to 128"):
        assert words_ in said
    assert "4 (33.3%) are longer than sequence_length (160)" in said
    assert found["statistics"]["longer"] == 4


def test_documents_are_shown(tiny: Tiny, tmp_path: Path) -> None:
    found = json.loads(inspected(tmp_path, tiny(), "--json").stdout)
    assert found["kind"] == "documents"
    assert found["packing"] == "concatenate"
    assert found["padding"] == 0
    assert sum(found["lengths"].values()) == found["train"]["documents"]
    assert len(found["shown"]) == len(found["first_samples"]) == 3
    assert "Chapter" in found["shown"][0]["text"]


NOISE = ("short", "Good â€œquotesâ€\x9d. " + "word " * 30, "of Fish, " * 200, "A text. " * 20)


def noisy(path: Path, tiny: Tiny, **keys: Any) -> dict[str, Any]:
    """A config with filters, and a text for each decision beside 40 that are kept."""
    texts = [*NOISE, *(f"Text {k}. " + "It goes on. " * (k + 20) for k in range(40))]
    file = path / "noisy.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    clean = {"unicode": True, "length": {"min_characters": 100, "max_characters": 1500}}
    return tiny(data={"sources": [{"type": "jsonl", "path": str(file)}], "clean": clean, **keys})


def test_filters_show_what_they_decide(tiny: Tiny, tmp_path: Path) -> None:
    values = noisy(tmp_path, tiny, held_out=0.0)
    done = inspected(tmp_path, values, "--documents", "20", "--json")
    found = json.loads(done.stdout)
    sample = found["sample"]
    counts = [sample[name] for name in ("documents", "kept", "changed", "rejected")]
    assert counts == [20, 17, 1, 2]
    short, mended, long, kept = sample["decisions"][:4]
    assert short["decision"] == long["decision"] == "rejected"
    assert short["reason"] == "length: few characters 5 < 100"
    assert "1800 > 1500" in long["reason"]
    assert (mended["decision"], mended["text"][:9]) == ("changed", NOISE[1][:9])
    assert mended["after"].startswith("Good “quotes”. word")
    assert (kept["decision"], kept["text"]) == ("kept", NOISE[3])
    assert [row["documents"] for row in sample["reasons"]] == [1, 1]
    prepared = Run.open(values).prepare(lambda _: None)
    lengths = np.concatenate([np.diff(prepared.train[k].offsets) for k in range(1)])
    statistics, train = found["statistics"], found["train"]
    assert statistics["documents"] == train["documents"] == 42
    assert statistics["bytes_per_token"] == train["bytes"] / train["tokens"]
    assert statistics["tokens_per_document"] == {
        "median": np.median(lengths),
        "p90": np.percentile(lengths, 90),
        "max": lengths.max(),
    }
    said = inspected(tmp_path, values, "--examples", "4").stdout
    for words in ("41 kept", "few characters", "5 < 100", "was:  Good â", "is:   Good “q", "█"):
        assert words in said, words


def test_of_large_data_a_sample_is_looked_at(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is prepared for it."""
    cache = tmp_path / "not-there"
    values = noisy(tmp_path, tiny, cache=str(cache))
    monkeypatch.setattr(sys.modules["rostra.data.inspection"], "PREPARED_BYTES", 1000)
    done = inspected(tmp_path, values, "--documents", "10", "--json")
    found = json.loads(done.stdout)
    assert not cache.exists()
    assert "only the first 10 documents" in done.stderr
    assert found["bytes"] == (tmp_path / "noisy.jsonl").stat().st_size
    assert found["statistics"]["documents"] == 8
    assert len(found["shown"]) == 3
    full = inspected(tmp_path, values, "--full", "--json", "--documents", "10")
    assert json.loads(full.stdout)["train"]["documents"] > 8
    assert cache.exists()


def preferences(tiny: Tiny, tmp_path: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    tokenizer = {"vocabulary": 300, "added": ["<|im_start|>", "<|im_end|>"]}
    keys = {"tokenizer": tokenizer, "chat_template": "chatml"}
    return tiny(data=examples(tmp_path, "preference", records, **keys))


def test_preferences_are_checked_and_shown(tiny: Tiny, tmp_path: Path) -> None:
    pair = {"prompt": "Say good day.", "chosen": "Good day!", "rejected": "No."}
    thumb = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hm"}]
    }
    records = [pair] * 5 + [{**thumb, "label": k > 0} for k in range(3)]
    values = preferences(tiny, tmp_path, records)
    found = json.loads(inspected(tmp_path, values, "--json").stdout)
    assert (found["chosen"], found["rejected"], found["up"], found["down"]) == (5, 5, 2, 1)
    said = inspected(tmp_path, values, "--examples", "2").stdout
    assert "chosen, " in said
    assert "rejected, " in said
    with pytest.raises(RequestError, match="line 9"):
        Run.open(preferences(tiny, tmp_path, [*records, {"chosen": "x"}])).inspect()


@pytest.mark.parametrize("file", ["dpo_en_demo.json", "kto_en_demo.json"])
def test_real_preferences_are_read(tiny: Tiny, tmp_path: Path, file: str) -> None:
    path = SHARED_DATA / "sft" / file
    if not path.is_file():
        pytest.skip(f"needs {path}")
    values = preferences(tiny, tmp_path, json.loads(path.read_text())[:20])
    found = Run.open(values).inspect(1, pytest.fail).to_dict()
    assert sum(found["lengths"].values()) == (40 if "dpo" in file else 20)
