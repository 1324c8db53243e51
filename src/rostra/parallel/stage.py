"""The model of a rank together with its loss: what runs a micro batch forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rostra.batch import Batch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

# From a micro batch: what the base model is called with, and this rank's positions of it.
Inputs = Callable[[Batch], tuple[dict[str, Any], Batch]]
# From model, inputs, labels and their weights (in the batch), and the factor of the gradients:
# the scaled loss and the plain sum.
Loss = Callable[[PreTrainedModel, dict[str, Any], Batch, float], tuple[Tensor, Tensor]]


class Steps(Protocol):
    """What depends on the step beside the weights: noise and dropout."""

    step: int


class Stage(nn.Module):
    """The whole model, or one stage of a pipeline; the root of what is sharded.

    Called with the hidden states of the stage before [samples, positions, hidden] (nothing on
    the first) and the tensors of a micro batch. Returns hidden states; on the last stage the
    scaled loss, whose plain sum it adds to `total`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Loss,
        inputs: Inputs,
        first: bool = True,
        last: bool = True,
        aliases: dict[str, str] | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        keys: Steps | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.inputs = inputs
        self.autocast = autocast
        self.first, self.last = first, last
        # names of copies here of parameters that another stage owns, with their names there
        self.aliases = aliases or {}
        self.keys = keys  # of what is drawn
        self.factor = 1.0  # of the loss: loss scale over the weight of the global batch
        self.total: Tensor | None = None

    def forward(self, *hidden: Tensor, **tensors: Tensor) -> Tensor:
        # here and not around the step: a backward pass, or an optimizer in it, is not autocast
        with self.autocast():
            return self._compute(hidden, Batch(**tensors))

    def _compute(self, hidden: tuple[Tensor, ...], batch: Batch) -> Tensor:
        arguments, own = self.inputs(batch)
        if not self.first:
            del arguments["input_ids"]
            arguments["inputs_embeds"] = hidden[0]
        if not self.last:
            out: Tensor = self.model.base_model(**arguments).last_hidden_state
            return out
        scaled, plain = self.loss(self.model, arguments, own, self.factor)
        self.total = plain if self.total is None else self.total + plain
        return scaled

    def begin(self, factor: float, step: int = 0) -> None:
        self.factor, self.total = factor, None
        if self.keys is not None:
            self.keys.step = step

    def sum(self, device: torch.device) -> Tensor:
        """The plain loss summed over the micro batches since `begin`, float64."""
        if self.total is None:
            return torch.zeros((), dtype=torch.float64, device=device)
        return self.total.double()
