"""The one thing that passes from data to engine: samples as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # the label of a position that is no target


@dataclass(frozen=True)
class Batch:
    """Samples of one step. All tensors have the shape [samples, positions].

    `labels[i, t]` is the token that position t should foretell, or `IGNORE`.
    `position_ids` start again at 0 with every document when documents are isolated;
    attention reads the documents' borders from them.
    `weights[i, t]` is how much that label counts in the loss; without weights, all count 1.
    """

    input_ids: Tensor  # int64
    labels: Tensor  # int64
    position_ids: Tensor  # int64
    weights: Tensor | None = None  # float32, 0 where there is no target

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def targets(self) -> int:
        """Number of target tokens."""
        return int((self.labels != IGNORE).sum())

    @property
    def weight(self) -> float:
        """What the loss of the step is divided by: the targets, by their weights if any."""
        return self.targets if self.weights is None else float(self.weights.double().sum())

    def micro_batches(self, size: int) -> Iterator[Batch]:
        """Parts of at most `size` samples, in order; the last may be smaller."""
        for first in range(0, len(self), size):
            yield self.rows(first, first + size)

    def tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in ("input_ids", "labels", "position_ids")}
        return found if self.weights is None else {**found, "weights": self.weights}

    def rows(self, first: int, end: int) -> Batch:
        return Batch(**{name: tensor[first:end] for name, tensor in self.tensors().items()})

    def padded(self, rows: int) -> Batch:
        """With `rows` samples at least: those that are added have no target."""
        lacking = rows - len(self)
        if lacking <= 0:
            return self
        shape = (lacking, self.input_ids.shape[1])
        added = {
            "input_ids": self.input_ids.new_zeros(shape),
            "labels": self.labels.new_full(shape, IGNORE),
            "position_ids": torch.arange(shape[1], device=self.input_ids.device).expand(shape),
        }
        if self.weights is not None:
            added["weights"] = self.weights.new_zeros(shape)
        return Batch(**{n: torch.cat([t, added[n]]) for n, t in self.tensors().items()})

    def share(self, rank: int, ranks: int) -> Batch:
        """The rows of `rank` when `ranks` divide the batch; as many for each."""
        size = -(-len(self) // ranks)
        return self.rows(rank * size, (rank + 1) * size).padded(size)

    def to(self, device: torch.device) -> Batch:
        return Batch(**{n: t.to(device, non_blocking=True) for n, t in self.tensors().items()})


def share_of(samples: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first of the samples of `rank` and their number, when `ranks` share `samples` as
    evenly as can be."""
    size, more = divmod(samples, ranks)
    return rank * size + min(rank, more), size + (rank < more)
