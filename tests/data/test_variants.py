"""Variants of examples from config to batches: one an epoch, the held-out ones as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rostra.batch import IGNORE, Batch
from rostra.config.data import DataSection
from rostra.data import Loader, Prepared, open_prepared, prepare, training_loader

Section = Callable[..., DataSection]
AUGMENT = {"variants": 3, "prompts": ["Please: {instruction}", "{instruction} Now!"]}
COUNT, GLOBAL = 24, 4


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """Examples with prompts to vary, and texts without."""
    alpaca = [{"instruction": f"Say {k}.", "output": f"It is {k} " * 3} for k in range(COUNT)]
    (tmp_path / "alpaca.json").write_text(json.dumps(alpaca))
    (tmp_path / "texts.json").write_text(json.dumps([{"text": f"Plain {k}."} for k in range(6)]))
    return [
        {"type": "alpaca", "path": str(tmp_path / "alpaca.json")},
        {"type": "completion", "path": str(tmp_path / "texts.json")},
    ]


def loader_of(prepared: Prepared, data: DataSection) -> Loader:
    return training_loader(prepared, data, 7, GLOBAL, False, 0, pytest.fail)


def said(batch: Batch, prepared: Prepared) -> list[tuple[str, str]]:
    """Of each sample, all that it says, and its targets."""
    decode = partial(prepared.tokenizer.decode, skip_special_tokens=True)
    rows = zip(batch.input_ids, batch.labels, strict=True)
    return [(decode(row), decode(labels[labels != IGNORE])) for row, labels in rows]


def test_each_epoch_has_a_variant_and_answers_stay(
    sources: list[dict[str, Any]], section: Section
) -> None:
    keys = {"packing": "none", "held_out": 0.4, "prepare": {"shard_tokens": 900}}
    keys |= {"sequence_length": 128}
    plain = prepare(section(*sources, **keys), None, pytest.fail)
    data = section(*sources, **keys, augment=AUGMENT)
    prepared = prepare(data, None, pytest.fail)
    assert prepared.key != plain.key
    for name in ("train", "held_out"):  # variant 0 is what there is without
        ours, theirs = getattr(prepared, name), getattr(plain, name)
        assert [vars(c) for c in ours.counts] == [vars(c) for c in theirs.counts]
        assert all(ours[k].batch.equals(theirs[k].batch) for k in range(len(ours)))
    assert prepared.held_out.documents > 1
    loader = loader_of(prepared, data)
    size = prepared.train.documents
    epochs = [said(loader.batch(epoch * size, size), prepared) for epoch in range(4)]
    assert sorted(epochs[3]) == sorted(epochs[0])
    assert epochs[3] != epochs[0]  # the same examples in another order
    for rows in epochs:
        assert sorted(answer for _, answer in rows) == sorted(answer for _, answer in epochs[0])
    for text, answer in [row for rows in (epochs[1], epochs[2]) for row in rows]:
        assert ("Please: " in text) != (" Now!" in text) or answer.startswith("Plain")
    asked = [{text for text, _ in rows if "Say" in text} for rows in epochs]
    assert not asked[0] & asked[1] and not asked[1] & asked[2] and not asked[0] & asked[2]
    assert {text for text, _ in epochs[0]} & {text for text, _ in epochs[1]}  # the plain ones
    ids = {loader.locate(2 * size + k).documents[0] for k in range(size)}
    assert sum(id.endswith(":v2") for id in ids) == len(asked[2])
    other = prepare(section(*sources, **keys, augment={**AUGMENT, "seed": 1}), None, pytest.fail)
    assert other.key != prepared.key


@pytest.mark.parametrize("weighted", [False, True])
def test_positions_alone_decide(
    weighted: bool, sources: list[dict[str, Any]], section: Section
) -> None:
    """Ranks, and starting again in the middle, change nothing."""
    for weight, source in zip((3, 1), sources if weighted else [], strict=False):
        source["weight"] = weight
    data = section(*sources, sequence_length=128, augment=AUGMENT)
    prepared = prepare(data, None, pytest.fail)
    loader = loader_of(prepared, data)
    count = len(loader.sources[0]) * (2 if weighted else 1) + 5  # a round of all variants
    texts = said(loader.batch(0, count), prepared)
    opened = open_prepared(prepared.folder)
    assert opened is not None
    later = loader_of(opened, data)
    later.resume(loader.state(21), 21)
    for first in range(21, 29, 2):  # as two ranks do, with half of a batch each
        assert said(later.batch(first, 2), opened) == texts[first : first + 2]
    whole = " ".join(text for text, _ in texts)
    kept = {int(id.rsplit(":", 1)[1]) - 1 for id in shown_ids(prepared) if "alpaca" in id}
    for number in kept:
        assert f"\nPlease: Say {number}.\n" in whole
        assert f"\nSay {number}. Now!\n" in whole


def shown_ids(prepared: Prepared) -> list[str]:
    shards = [prepared.train[k] for k in range(len(prepared.train))]
    return [id for shard in shards for id in shard.batch.column("id").to_pylist()]


def test_what_cannot_vary_is_refused(sources: list[dict[str, Any]], section: Section) -> None:
    with pytest.raises(ValidationError, match="no source has any"):
        section(sources[1], augment=AUGMENT)
