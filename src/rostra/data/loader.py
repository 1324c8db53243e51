"""From shards to batches: every sample a pure function of seed, manifest and position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rostra.batch import IGNORE, Batch
from rostra.config.data import DataSection
from rostra.data.packing import Packed
from rostra.data.permutation import Permutation
from rostra.data.prepared import Prepared
from rostra.data.shards import Shards
from rostra.errors import RequestError


@dataclass(frozen=True)
class Position:
    """What stands at a position of the training: for logs, and for finding a bad document."""

    epoch: int
    sample: int  # its number g in the epoch's order
    index: int  # its place in the run of tokens, in samples; among rows of examples
    documents: tuple[str, ...]  # ids, in order; of examples, too


class Samples:
    """The training documents' tokens, run on across shards and cut into samples.

    Sample g of an epoch has the tokens `[i * T, (i + 1) * T)` of the run, T being
    `sequence_length` and i = Permutation(seed, epoch)(g), and as labels the tokens one further.
    What is left at the end of the run, less than a sample, is not used.

    With `isolate_documents` a position whose next token begins another document is no target,
    and position_ids start again at 0 with every document, also with one that began in the
    sample before.
    """

    def __init__(
        self, shards: Shards, sequence_length: int, seed: int, isolate_documents: bool
    ) -> None:
        self.shards = shards
        self.sequence_length = sequence_length
        self.seed = seed
        self.isolate_documents = isolate_documents

    def __len__(self) -> int:
        """Samples in an epoch."""
        return max(0, (self.shards.tokens - 1) // self.sequence_length)

    @property
    def tokens(self) -> int:
        """Positions in an epoch."""
        return len(self) * self.sequence_length

    def order(self, epoch: int) -> Permutation:
        return Permutation(self.seed, epoch, len(self))

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """The samples at these places of the run."""
        length = self.sequence_length
        tokens = np.empty((len(indices), length + 1), dtype=np.int64)
        begins = np.zeros((len(indices), length + 1), dtype=bool)  # a document does, there
        for row, index in enumerate(indices.tolist()):
            self._cut(index * length, tokens[row], begins[row])
        labels = tokens[:, 1:].copy()
        positions = np.tile(np.arange(length), (len(indices), 1))
        if self.isolate_documents:
            labels[begins[:, 1:]] = IGNORE
            starts = np.where(begins[:, :-1], positions, 0)
            positions = positions - np.maximum.accumulate(starts, axis=1)
        inputs = np.ascontiguousarray(tokens[:, :-1])
        return Batch(*map(torch.from_numpy, (inputs, labels, positions)))

    def document_ids(self, index: int) -> tuple[str, ...]:
        """The documents that the inputs of the sample at this place come from."""
        ids: list[str] = []
        first = index * self.sequence_length

        def collect(shard: Any, start: int, stop: int, _: int) -> None:
            low = int(np.searchsorted(shard.offsets, start, "right")) - 1
            high = int(np.searchsorted(shard.offsets, stop, "left"))
            ids.extend(shard.id(document) for document in range(low, high))

        self._walk(first, first + self.sequence_length, collect)
        return tuple(ids)

    def _cut(self, first: int, tokens: NDArray[np.int64], begins: NDArray[np.bool_]) -> None:
        """Fill in the tokens from `first` on, and where among them documents begin."""

        def copy(shard: Any, start: int, stop: int, at: int) -> None:
            tokens[at : at + stop - start] = shard.tokens[start:stop]
            low, high = np.searchsorted(shard.offsets, (start, stop))
            begins[at + shard.offsets[low:high] - start] = True

        self._walk(first, first + len(tokens), copy)

    def _walk(self, first: int, end: int, visit: Callable[[Any, int, int, int], None]) -> None:
        """Visit the run's tokens [first, end) shard by shard: (shard, start, stop, place)."""
        starts = self.shards.starts
        number = int(np.searchsorted(starts, first, "right")) - 1
        at = first
        while at < end:
            base = int(starts[number])
            stop = min(end, int(starts[number + 1]))
            visit(self.shards[number], at - base, stop - base, at - first)
            at = stop
            number += 1


class Loader:
    """Samples in the order of training. It has no state: a position is asked for, and a
    position is the number of samples since training began, over all epochs."""

    def __init__(self, samples: Samples | Packed, global_batch_size: int) -> None:
        self.samples = samples
        self.global_batch_size = global_batch_size

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions [first, first + count); a batch may cross epochs."""
        epochs, numbers = np.divmod(np.arange(first, first + count), len(self.samples))
        indices = [
            self.samples.order(int(epoch))(numbers[epochs == epoch]) for epoch in np.unique(epochs)
        ]
        return self.samples.batch(np.concatenate(indices))

    def locate(self, position: int) -> Position:
        """What is trained on at a position."""
        epoch, number = divmod(position, len(self.samples))
        index = self.samples.order(epoch)(number)
        return Position(epoch, number, index, self.samples.document_ids(index))

    @property
    def sample_tokens(self) -> float:
        """Tokens of a sample, on average; padding is none."""
        return self.samples.tokens / max(1, len(self.samples))

    def steps(self, epochs: float) -> int:
        """Optimizer steps that cover so many epochs, the last one perhaps going beyond."""
        return max(1, math.ceil(epochs * len(self.samples) / self.global_batch_size))


def training_samples(
    prepared: Prepared,
    data: DataSection,
    seed: int,
    global_batch_size: int,
    full_rows: bool,
    virtual_tokens: int,
    notice: Callable[[str], None],
) -> Samples | Packed:
    """The samples to train on, as `data` asks for them. See `Packed` for `full_rows` and
    `virtual_tokens`.

    Raises:
        RequestError: when no example is left, or long ones are to fail.
    """
    if not data.examples:
        return Samples(prepared.train, data.sequence_length, seed, data.isolate_documents)
    group = global_batch_size if data.group_by_length else None
    rows = {"full_rows": full_rows, "virtual_tokens": virtual_tokens}
    samples = _packed(prepared, prepared.train, data, seed=seed, group=group, notice=notice, **rows)
    if not len(samples):
        raise RequestError(
            f"no example has a target within data.sequence_length ({data.sequence_length}) "
            "tokens: raise it, or set data.long_examples: split"
        )
    return samples


def held_out_samples(
    prepared: Prepared, data: DataSection, full_rows: bool, virtual_tokens: int = 0
) -> Packed:
    """The held-out examples as samples, cut and packed like those that are trained on; there
    may be none."""
    rows = {"full_rows": full_rows, "virtual_tokens": virtual_tokens}
    return _packed(prepared, prepared.held_out, data, seed=0, **rows)


def _packed(prepared: Prepared, shards: Shards, data: DataSection, **options: Any) -> Packed:
    tokenizer = prepared.tokenizer
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return Packed(
        shards,
        data.sequence_length,
        packing="best_fit" if data.packed == "best_fit" else "none",
        long_examples=data.long_examples,
        pad=next(token for token in pads if token is not None),
        **options,
    )
