from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rostra.batch import Batch
from rostra.config.data import DataSection
from rostra.data import (
    Loader,
    Packed,
    held_out_samples,
    prepare,
    training_samples,
)
from rostra.data.encode import ExampleEncoder
from rostra.data.examples import ExampleReader
from rostra.data.shards import Shards
from rostra.data.sources import BadRecords
from rostra.errors import RequestError
from rostra.evaluate import evaluate_examples

Section = Callable[..., DataSection]
Told = dict[str, tuple[list[int], list[float]]]


def quiet(_: str) -> None:
    pass


def records(count: int = 60) -> list[dict[str, str]]:
    words = "the quick brown fox jumps over a lazy dog".split()
    return [
        {
            "instruction": f"Say {words[k % 9]} {k % 9} times.",
            "output": " ".join([words[k % 9]] * (1 + k % 40)) + f" {k}",
        }
        for k in range(count)
    ]


@pytest.fixture
def alpaca(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(records()))
    return {"type": "alpaca", "path": str(path)}


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "document.txt"
    path.write_text("rain falls on every quiet harbour " * 3)
    return {"type": "text", "path": str(path)}


def held(shards: Shards) -> Told:
    """Tokens and weights of each example, by id."""
    found: Told = {}
    for shard in map(shards.__getitem__, range(len(shards))):
        assert shard.weights is not None
        for row in range(len(shard.offsets) - 1):
            here = slice(shard.offsets[row], shard.offsets[row + 1])
            found[shard.id(row)] = shard.tokens[here].tolist(), shard.weights[here].tolist()
    return found


def test_examples_lie_whole_and_once_with_their_weights(
    alpaca: dict[str, Any], document: dict[str, Any], section: Section
) -> None:
    """As the encoder makes them; a document between them has every token as a target."""
    data = section(alpaca, document, prepare={"shard_tokens": 900})
    shares: list[float] = []
    prepared = prepare(data, None, pytest.fail, lambda p: shares.append(p.share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    train, kept = held(prepared.train), held(prepared.held_out)
    assert len(prepared.train) > 1
    assert len(kept) > 3
    reader, bad = ExampleReader(0, data.sources[0]), BadRecords("fail", quiet)  # type: ignore[arg-type]
    examples = [e for part in reader.parts(bad) for e in reader.examples(part, bad)]
    encoded = ExampleEncoder(prepared.tokenizer, data, bad).encode(examples)
    expected = {one.id: (one.tokens.tolist(), one.weights.tolist()) for one in encoded}
    (text,) = {*train, *kept} - {*expected}
    assert text.endswith("document.txt")
    tokens, weights = {**train, **kept}[text]
    assert weights == [0.0] + [1.0] * (len(tokens) - 1)
    assert {**train, **kept} == {**expected, text: (tokens, weights)}
    assert not train.keys() & kept.keys()
    for example in examples:  # the side is of what it says alone
        said = "".join(segment.text for segment in example.content.segments)  # type: ignore[union-attr]
        below = int(sha256(said.encode()).hexdigest(), 16) < 0.2 * 2**256
        assert below == (example.id in kept)
    audit = prepared.audit
    assert (
        audit["train"]["examples"] == prepared.manifest["counts"]["train"]["examples"] == len(train)
    )
    assert audit["train"]["targets"] == sum(w > 0 for _, ws in train.values() for w in ws)
    assert audit["held_out"]["tokens"] == prepared.held_out.tokens
    assert sum(audit["train"]["lengths"].values()) == len(train)


def test_the_key_is_of_what_decides_tokens_and_weights(
    alpaca: dict[str, Any], section: Section, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(source: dict[str, Any] | None = None, **keys: Any) -> str:
        return prepare(section(source or alpaca, **keys), None, quiet).key

    monkeypatch.setattr("rostra.data.cache._FRESH_NS", 0)
    first = key()
    added = {"vocabulary": 320, "added": ["<|im_start|>", "<|im_end|>"]}
    others = [
        key(train_on_inputs=True),
        key(tokenizer=added),
        key(tokenizer={"vocabulary": 320, "special": {"pad_token": "<pad>"}}),
        key({**alpaca, "type": "mapping"}),
        key(held_out=0.3),
    ]
    assert len({first, *others}) == 6
    monkeypatch.setattr(sys.modules["rostra.data.prepare"], "Preparation", pytest.fail)
    assert key(sequence_length=16, packing="none", group_by_length=True) == first
    assert key(long_examples="split") == first


def test_the_tokenizer_knows_training_examples_only(tmp_path: Path, section: Section) -> None:
    """With held-out examples replaced by others, the tokenizer is the same."""
    source = {"type": "completion", "path": str(tmp_path / "a.jsonl")}
    sides: dict[bool, list[str]] = {True: [], False: []}
    for number in range(100):
        text = f"example {number} {'zyx' * 30 if number % 2 else 'abc' * 30}"
        sides[int(sha256(text.encode()).hexdigest(), 16) / 2**256 < 0.3].append(text)
    hashes = set()
    for count in (3, 9):
        lines = [json.dumps({"text": text}) for text in sides[False] + sides[True][:count]]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        hashes.add(prepare(section(source, held_out=0.3), None, quiet).tokenizer_hash)
    assert len(hashes) == 1


def test_what_cannot_be_trained_on_is_refused_and_leaves_nothing(
    alpaca: dict[str, Any], section: Section, tmp_path: Path
) -> None:
    path, source = Path(alpaca["path"]), {**alpaca, "path": str(tmp_path / "b.jsonl")}
    pair = {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}
    endless = {"segments": [{"text": "a b", "label": False}, {"text": " c d", "label": True}]}
    cases: list[tuple[dict[str, Any], list[Any], str, dict[str, Any]]] = [
        ({**source, "type": "preference"}, [pair], r"data\.sources\.1: preference .* inspect", {}),
        (source, [{"instruction": "Say it."}], r"b\.jsonl, line 1: has no 'output'", {}),
        (source, records(3), r"no example to train on\. .*data\.held_out \(1\)", {"held_out": 1.0}),
    ]
    for given, lines, said, keys in cases:
        Path(given["path"]).write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(RequestError, match=said):
            prepare(section(alpaca, given, **keys), None, quiet)
    Path(source["path"]).write_text(json.dumps(endless))
    with pytest.raises(RequestError, match="end-of-turn or eos"):
        prepare(section({**source, "type": "input_output"}, held_out=0.0), None, quiet)
    assert not (tmp_path / "cache").exists()
    path.write_text(json.dumps([*records(20), {"instruction": "Say it.", "output": " "}]))
    heard: list[str] = []
    skipping = section(alpaca, on_bad_record="skip")
    prepared = prepare(skipping, None, heard.append)
    assert prepared.train.documents + prepared.held_out.documents == 20
    assert sum(prepared.skipped.values()) == 1
    assert "record 21" in heard[0]
    prepare(skipping, None, heard.append)  # said again, though from the cache
    assert "skipped when this data was prepared: 1 " in heard[-1]


def test_samples_are_as_the_config_asks(alpaca: dict[str, Any], section: Section) -> None:
    padded = {"vocabulary": 320, "special": {"pad_token": "<pad>"}}
    prepared = prepare(section(alpaca, tokenizer=padded), None, quiet)
    heard: list[str] = []

    def samples(**keys: Any) -> Packed:
        found = training_samples(prepared, section(alpaca, **keys), 1, 4, False, 0, heard.append)
        assert isinstance(found, Packed)
        return found

    longest = max(len(tokens) for tokens, _ in held(prepared.train).values())
    every = prepared.train.documents
    packed = samples(sequence_length=longest)
    assert packed.tokens == prepared.train.tokens
    assert len(packed) < every
    assert heard == []
    assert len(samples(sequence_length=longest, packing="none")) == every
    grouped = samples(sequence_length=longest, packing="none", group_by_length=True)
    assert grouped.group == 4
    assert Loader(grouped, 4).steps(2) == math.ceil(2 * every / 4)
    assert samples(sequence_length=longest - 1).tokens < packed.tokens
    assert "data.long_examples" in heard[0]
    last = packed.batch(np.arange(len(packed))[-1:])
    assert int(last.input_ids[0, -1]) == prepared.tokenizer.pad_token_id > 0
    with pytest.raises(
        RequestError, match=r"no example has a target .* data\.sequence_length \(4\)"
    ):
        samples(sequence_length=4)
    with pytest.raises(RequestError, match=r"alpaca\.json:\d+: this example has"):
        samples(sequence_length=longest - 1, long_examples="fail")


def test_held_out_examples_are_measured_by_weight(tmp_path: Path, section: Section) -> None:
    """A model that charges each target its token's id; the bytes are those of the answers."""
    path = tmp_path / "chat.jsonl"
    talks = [
        [
            {"role": "user", "content": f"question {k}"},
            {"role": "assistant", "content": f"answer ä {k}", "weight": 0.5 if k % 2 else 1},
        ]
        for k in range(40)
    ]
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    tokenizer = {"vocabulary": 280, "added": ["<|im_start|>", "<|im_end|>"]}
    source = {"type": "chat", "path": str(path)}
    data = section(source, tokenizer=tokenizer, chat_template="chatml", held_out=0.5)
    data = data.model_copy(update={"sequence_length": 128})
    prepared = prepare(data, None, pytest.fail)
    assert prepared.tokenizer.chat_template is not None  # goes with the model
    charged: list[torch.Size] = []

    def forward(batch: Batch) -> tuple[float, float]:
        charged.append(batch.input_ids.shape)
        assert batch.weights is not None
        nats = batch.weights * batch.labels.clamp(min=0)
        return float(nats.sum()), float(batch.weights.sum())

    found = evaluate_examples(
        forward, held_out_samples(prepared, data, True), prepared.tokenizer, 2
    )
    kept = held(prepared.held_out)
    pairs = [
        pair for tokens, weights in kept.values() for pair in zip(tokens, weights, strict=True)
    ]
    assert {w for _, w in pairs} == {0.0, 0.5, 1.0}
    loss = sum(t * w for t, w in pairs) / sum(w for _, w in pairs)
    assert found.loss == pytest.approx(loss)
    assert found.documents == len(kept)
    assert found.tokens == sum(w > 0 for _, w in pairs)
    size = sum(len(f"answer ä {int(id.rsplit(':')[-1]) - 1}".encode()) for id in kept)
    assert found.bits_per_byte == pytest.approx(loss * found.tokens / math.log(2) / size)
    assert set(charged) == {(2, 128)}
    few = evaluate_examples(
        forward, held_out_samples(prepared, data, True), prepared.tokenizer, 2, documents=3
    )
    assert 3 <= few.documents < found.documents


@pytest.mark.parametrize("length", [512, 1024])
def test_best_fit_leaves_hardly_any_padding(
    shared_data: Path, section: Section, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = {"type": "alpaca", "path": str(shared_data / "sft" / "alpaca_en_demo.json")}
    cache = tmp_path_factory.getbasetemp() / "alpaca"  # prepared once
    data = section(source, sequence_length=length, tokenizer={"vocabulary": 1000}, cache=str(cache))
    samples = training_samples(prepare(data, None, quiet), data, 0, 8, True, 0, quiet)
    assert isinstance(samples, Packed)
    assert samples.padding(8) < 0.02
    batch = Loader(samples, 8).batch(0, 8)
    assert batch.labels.shape == (8, length)
    assert 0.5 < batch.targets / (8 * length) < 1
