"""How well a model foretells documents it has never seen."""

from __future__ import annotations

import lzma
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rostra.batch import IGNORE, Batch
from rostra.data import HeldOut, Packed
from rostra.data.chat import MARKS
from rostra.optim import cross_entropy_sum

Forward = Callable[[Batch], tuple[float, float]]


@dataclass(frozen=True)
class Evaluation:
    """Over all held-out documents or examples: `loss` in nats a token; `bits_per_byte`, the nats
    of all tokens over ln 2 and the documents' UTF-8 bytes."""

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    documents: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def evaluate(
    forward: Forward,
    documents: Iterable[HeldOut],
    start: int | None,
    sequence_length: int,
    stride: int,
    batch_size: int,
) -> Evaluation:
    """Every document starts afresh, from the token `start` (the tokenizer's end or begin
    mark), and is read in windows of `sequence_length` that move on by `stride`: each token
    is foretold once, with at least `sequence_length - stride` tokens before it where the
    document has them.
    """
    total, targets, count, size = 0.0, 0, 0, 0

    def counted() -> Iterator[HeldOut]:
        nonlocal count, size
        for document in documents:
            count, size = count + 1, size + document.bytes
            yield document

    for batch in _batches(counted(), start, sequence_length, stride, batch_size):
        nats, foretold = forward(batch)
        total += nats
        targets += round(foretold)
    loss = total / max(1, targets)
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=total / math.log(2) / max(1, size),
        tokens=targets,
        documents=count,
    )


Window = tuple[NDArray[np.int64], NDArray[np.int64]]


def _windows(
    documents: Iterable[HeldOut], start: int | None, length: int, stride: int
) -> Iterator[Window]:
    """Inputs and labels of each window; labels that an earlier window has are ignored."""
    for document in documents:
        tokens = np.asarray(document.tokens, dtype=np.int64)
        if start is not None and tokens[0] != start:
            tokens = np.concatenate([[start], tokens])
        done = 0  # targets foretold so far
        for first in range(0, len(tokens), stride):
            if done >= len(tokens) - 1:
                break
            piece = tokens[first : first + length + 1]
            labels = piece[1:].copy()
            labels[: done - first] = IGNORE
            done = first + len(labels)
            yield piece[:-1], labels


def _batches(
    documents: Iterable[HeldOut], start: int | None, length: int, stride: int, size: int
) -> Iterator[Batch]:
    """Windows by `size`, all of one shape, so that compiled code is compiled once."""
    rows: list[Window] = []
    for window in _windows(documents, start, length, stride):
        rows.append(window)
        if len(rows) == size:
            yield _stack(rows, length, size)
            rows = []
    if rows:
        yield _stack(rows, length, size)


def _stack(rows: list[Window], length: int, size: int) -> Batch:
    inputs = np.zeros((size, length), dtype=np.int64)
    labels = np.full((size, length), IGNORE, dtype=np.int64)
    for index, (window, targets) in enumerate(rows):
        inputs[index, : len(window)] = window
        labels[index, : len(targets)] = targets
    positions = torch.arange(length).expand(size, length).contiguous()
    return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), positions)


def evaluate_examples(
    forward: Forward,
    samples: Packed,
    tokenizer: PreTrainedTokenizerFast,
    batch_size: int,
    documents: int | None = None,
) -> Evaluation:
    """Over the targets of held-out examples: `loss` by their weights, `tokens` their number,
    `bits_per_byte` by the bytes of their text, in which special tokens and marks of turns have
    none.

    `samples` are those of the held-out shards; with `documents`, of as many rows as hold about
    so many examples, always the same ones.
    """
    rows = len(samples)
    if documents is not None:
        rows = min(rows, math.ceil(rows * documents / max(1, samples.shards.documents)))
    chosen = samples.order(0)(np.arange(rows))
    total, weight, targets, size = 0.0, 0.0, 0, 0
    seen: set[str] = set()
    added = tokenizer.added_tokens_decoder.items()
    marks = [id for id, token in added if token.special or MARKS.fullmatch(token.content)]
    for first in range(0, rows, batch_size):
        indices = chosen[first : first + batch_size]
        batch = samples.batch(indices)
        nats, counted = forward(batch.padded(batch_size))
        total, weight, targets = total + nats, weight + counted, targets + batch.targets
        size += _target_bytes(batch, tokenizer, marks)
        seen.update(id for index in indices.tolist() for id in samples.document_ids(index))
    loss = total / weight if weight else 0.0
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss * targets / math.log(2) / max(1, size),
        tokens=targets,
        documents=len(seen),
    )


def _target_bytes(batch: Batch, tokenizer: PreTrainedTokenizerFast, marks: list[int]) -> int:
    """Bytes in UTF-8 of the text of all targets, without `marks`."""
    passed = torch.tensor([IGNORE, *marks])
    trained = [row[~torch.isin(row, passed)].tolist() for row in batch.labels]
    texts = tokenizer.backend_tokenizer.decode_batch(trained, skip_special_tokens=False)
    return sum(len(text.encode()) for text in texts)


def plain_forward(model: PreTrainedModel) -> Forward:
    """A whole model in one process, as `evaluate` and `evaluate_examples` call it."""

    @torch.no_grad()
    def forward(batch: Batch) -> tuple[float, float]:
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        logits = model(**inputs, use_cache=False).logits
        return float(cross_entropy_sum(logits, batch.labels, batch.weights)), batch.weight

    return forward


def xz_bits_per_byte(documents: Iterable[HeldOut]) -> tuple[float, float]:
    """What `xz -9` needs: afresh on each document, and on all of them at once."""
    size, each = 0, 0
    together = lzma.LZMACompressor(preset=9)
    whole = 0
    for document in documents:
        text = document.text.encode()
        size += len(text)
        each += len(lzma.compress(text, preset=9))
        whole += len(together.compress(text))
    whole += len(together.flush())
    return 8 * each / max(1, size), 8 * whole / max(1, size)
