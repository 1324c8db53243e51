"""NEFTune (Jain et al. 2023, arXiv:2310.05914): noise on the embeddings while training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rostra.adapt.keyed import Inputs, Keys, Part, counted, uniform
from rostra.batch import Batch


class Neftune:
    """Adds alpha / sqrt(L d) times numbers from -1 to 1 to the embeddings of each example, of L
    tokens in d dimensions; the same numbers in every layout. Evaluation is without."""

    def __init__(self, alpha: float, keys: Keys) -> None:
        self.alpha, self.keys = alpha, keys
        self._next: tuple[Tensor, Tensor] | None = None  # keys and scale [b, T]

    def attach(self, model: PreTrainedModel, inputs: Inputs, part: Part) -> Inputs:
        """Disturb the input embedding of `model`, in place; returns what `inputs` has to be
        replaced by. `part` cuts a tensor [b, T] of a micro batch to the positions that the model
        is called with: nothing, where the context is not split."""

        def prepared(batch: Batch) -> tuple[dict[str, Any], Any]:
            keys = self.keys.positions(batch.input_ids)
            scale = self.alpha / example_lengths(batch).sqrt()
            self._next = part(keys), part(scale)
            return inputs(batch)

        # first, so that whatever else follows the look-up finds it disturbed
        model.get_input_embeddings().register_forward_hook(self._disturb)
        return prepared

    def _disturb(self, embedding: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        following, self._next = self._next, None
        if not embedding.training or following is None:
            return embedded
        keys, scale = following
        size = embedded.shape[-1]
        features = torch.arange(size, device=keys.device)
        noise = uniform(counted(keys[..., None], features))
        return embedded + (noise * (scale / size**0.5)[..., None]).to(embedded.dtype)


def example_lengths(batch: Batch) -> Tensor:
    """For each position [b, T] the number of tokens of its example, float32; virtual ones are
    not counted, and have themselves infinitely many: no noise falls on them."""
    begins = batch.position_ids == 0
    begins[:, 0] = True
    example = begins.cumsum(1) - 1
    real = (batch.input_ids >= 0).float()
    totals = torch.zeros_like(real).scatter_add_(1, example, real)
    return torch.where(real > 0, totals.gather(1, example), torch.inf)
