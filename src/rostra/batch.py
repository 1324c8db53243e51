"""The one thing that passes from data to engine: samples as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # the label of a position that is no target


@dataclass(frozen=True)
class Batch:
    """Samples of one step. All tensors are int64 of shape [samples, positions].

    `labels[i, t]` is the token that position t should foretell, or `IGNORE`.
    `position_ids` start again at 0 with every document when documents are isolated;
    attention reads the documents' borders from them.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def targets(self) -> int:
        """Number of target tokens: what the loss of the step is divided by."""
        return int((self.labels != IGNORE).sum())

    def micro_batches(self, size: int) -> Iterator[Batch]:
        """Parts of at most `size` samples, in order; the last may be smaller."""
        for parts in zip(
            self.input_ids.split(size),
            self.labels.split(size),
            self.position_ids.split(size),
            strict=True,
        ):
            yield Batch(*parts)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
        }

    def rows(self, first: int, end: int) -> Batch:
        return Batch(*(tensor[first:end] for tensor in self.tensors().values()))

    def padded(self, rows: int) -> Batch:
        """With `rows` samples at least: those that are added have no target."""
        lacking = rows - len(self)
        if lacking <= 0:
            return self
        length, device = self.input_ids.shape[1], self.input_ids.device
        positions = torch.arange(length, device=device).expand(lacking, -1)
        return Batch(
            torch.cat([self.input_ids, self.input_ids.new_zeros(lacking, length)]),
            torch.cat([self.labels, self.labels.new_full((lacking, length), IGNORE)]),
            torch.cat([self.position_ids, positions]),
        )

    def share(self, rank: int, ranks: int) -> Batch:
        """The rows of `rank` when `ranks` divide the batch; as many for each."""
        size = -(-len(self) // ranks)
        return self.rows(rank * size, (rank + 1) * size).padded(size)

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
        )


def share_of(samples: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first of the samples of `rank` and their number, when `ranks` share `samples` as
    evenly as can be."""
    size, more = divmod(samples, ranks)
    return rank * size + min(rank, more), size + (rank < more)
