from __future__ import annotations

import lzma
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rostra.batch import IGNORE, Batch
from rostra.data import HeldOut
from rostra.evaluate import evaluate, xz_bits_per_byte


def document(tokens: list[int], text: str = "abc") -> HeldOut:
    return HeldOut("x", np.array(tokens, dtype=np.uint16), len(text.encode()), text)


class Recorder:
    """A model that charges each target its own value, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # target, tokens before it in its window
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, batch: Batch) -> tuple[float, int]:
        self.shapes.add(tuple(batch.input_ids.shape))
        for inputs, labels in zip(batch.input_ids, batch.labels, strict=True):
            for place in torch.nonzero(labels != IGNORE).flatten().tolist():
                target = int(labels[place])
                assert int(inputs[place]) == target - 1  # tokens count up in these tests
                self.asked.append((target, place + 1))
        counted = batch.labels[batch.labels != IGNORE]
        return float(counted.sum()), len(counted)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    length=st.integers(2, 16),
    stride=st.integers(1, 16),
    batch=st.integers(1, 5),
)
def test_every_token_is_foretold_once_with_enough_before_it(
    sizes: list[int], length: int, stride: int, batch: int
) -> None:
    stride = min(stride, length)
    model = Recorder()
    documents = [document(list(range(100 * i, 100 * i + n))) for i, n in enumerate(sizes)]
    found = evaluate(model, documents, None, length, stride, batch)
    expected = [100 * i + k for i, n in enumerate(sizes) for k in range(1, n)]
    assert sorted(target for target, _ in model.asked) == expected
    for target, before in model.asked:
        assert before >= min(target % 100, length - stride + 1)
    assert model.shapes <= {(batch, length)}
    assert found.tokens == len(expected)
    assert found.documents == len(sizes)


def test_bits_per_byte_is_nats_over_ln_2_and_bytes() -> None:
    model = Recorder()
    found = evaluate(model, [document([1, 2, 3], "äb")], None, 8, 4, 2)
    assert found.loss == pytest.approx(2.5)
    assert found.perplexity == pytest.approx(math.exp(2.5))
    assert found.bits_per_byte == pytest.approx(5 / math.log(2) / 3)


def test_a_document_without_a_begin_mark_is_given_one() -> None:
    model = Recorder()
    evaluate(model, [document([5, 6])], 4, 8, 4, 1)
    evaluate(model, [document([4, 5])], 4, 8, 4, 1)
    assert [target for target, _ in model.asked] == [5, 6, 5]


def test_xz_is_measured_on_each_document_and_on_all() -> None:
    texts = ["a quiet harbour " * 50, "small boats went out " * 30]
    each, whole = xz_bits_per_byte(document([1], text) for text in texts)
    size = sum(map(len, texts))
    assert each == 8 * sum(len(lzma.compress(t.encode(), preset=9)) for t in texts) / size
    assert whole == 8 * len(lzma.compress("".join(texts).encode(), preset=9)) / size
