from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_documents_are_shown(tiny: Tiny, tmp_path: Path) -> None:
    found = json.loads(inspected(tmp_path, tiny(), "--json").stdout)
    assert found["kind"] == "documents"
    assert found["packing"] == "concatenate"
    assert found["padding"] == 0
    assert sum(found["lengths"].values()) == found["train"]["documents"]
    assert len(found["shown"]) == len(found["first_samples"]) == 3
    assert "Chapter" in found["shown"][0]["text"]


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
