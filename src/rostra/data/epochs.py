"""The samples of a source, epoch after epoch, and batches of several sources joined."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from rostra.batch import IGNORE, Batch
from rostra.data.packing import Packed
from rostra.data.samples import Samples

Ints = NDArray[np.int64]


class Source:
    """The samples of one source, epoch after epoch.

    Of a source that was prepared in several variants, epoch e has those of variant e modulo
    their number; they may be of unequal length.
    """

    def __init__(self, *variants: Samples | Packed) -> None:
        self.variants = variants
        self._starts = np.cumsum([0, *map(len, variants)], dtype=np.int64)

    def __len__(self) -> int:
        """Samples in an epoch of every variant."""
        return int(self._starts[-1])

    def samples(self, epochs: float) -> int:
        """Samples in so many epochs, a part of one counted up."""
        cycles, rest = divmod(epochs, len(self.variants))
        whole, part = divmod(rest, 1)
        sizes = np.diff(self._starts)
        more = math.ceil(part * int(sizes[int(whole)])) if part else 0
        return int(cycles) * len(self) + int(self._starts[int(whole)]) + more

    def epochs(self, samples: int) -> float:
        """How often the source was seen after so many of its samples."""
        return len(self.variants) * samples / max(1, len(self))

    @property
    def sample_tokens(self) -> float:
        """Tokens of a sample, on average; padding is none."""
        return sum(variant.tokens for variant in self.variants) / max(1, len(self))

    def find(self, number: int) -> tuple[int, int]:
        """Of the source's n-th sample the epoch, and its number there."""
        cycle, number = divmod(number, len(self))
        variant = int(np.searchsorted(self._starts, number, "right")) - 1
        return cycle * len(self.variants) + variant, number - int(self._starts[variant])

    def places(self, numbers: Ints) -> Ints:
        """Of these samples the variant and the index there: [samples, 2]."""
        cycles, within = np.divmod(numbers, len(self))
        variants = np.searchsorted(self._starts, within, "right") - 1
        epochs = cycles * len(self.variants) + variants
        places = np.stack([variants, within - self._starts[variants]], axis=1)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order = self.variants[epoch % len(self.variants)].order(epoch)
            places[here, 1] = order(places[here, 1])
        return places


def joined(parts: list[Batch], places: Ints) -> Batch:
    """The samples of all parts, each where `places` says, as wide as the widest."""
    width = max(part.input_ids.shape[1] for part in parts)
    weighted = any(part.weights is not None for part in parts)
    wide = [_widened(part, width, weighted).tensors() for part in parts]
    order = torch.from_numpy(np.argsort(places))
    return Batch(**{name: torch.cat([part[name] for part in wide])[order] for name in wide[0]})


def _widened(batch: Batch, width: int, weighted: bool) -> Batch:
    """With padding up to `width` that no position sees; with weights, if others have them."""
    tensors = batch.tensors()
    if weighted and batch.weights is None:
        tensors["weights"] = (batch.labels != IGNORE).float()
    more = width - batch.input_ids.shape[1]
    if more:
        rows = len(batch)
        added = {
            "input_ids": batch.input_ids[:, -1:].expand(rows, more),
            "labels": batch.labels.new_full((rows, more), IGNORE),
            "position_ids": torch.arange(more).expand(rows, more),
            "weights": torch.zeros(rows, more),
        }
        tensors = {name: torch.cat([x, added[name]], dim=1) for name, x in tensors.items()}
    return Batch(**tensors)
