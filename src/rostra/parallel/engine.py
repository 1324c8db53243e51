"""What the training step knows of whatever executes a layout."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig

from rostra.batch import Batch
from rostra.layout import Layout
from rostra.pieces import Piece, Reader


class Engine(Protocol):
    """Executes a layout. The loss of a step is the sum over all target tokens of the global
    batch divided by their number, whatever the micro batches and ranks. Every method is called
    by all ranks; the numbers of a step are the same on all of them."""

    layout: Layout
    shape: PretrainedConfig  # of the whole model
    steps: int  # done

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number among those that have different samples, and how many these are."""
        ...

    def forward_backward(self, batch: Batch) -> tuple[float, int]:
        """Gradients of the step's loss, from this rank's samples of the global batch; returns
        the loss's sum in nats over all of it, and its targets."""
        ...

    def gradient_norm(self) -> float:
        """Euclidean norm of the gradients of the whole model, before clipping."""
        ...

    def step(self, accept: bool) -> float:
        """Clip, update (when accepted), clear; returns the learning rate that was used."""
        ...

    def forward(self, batch: Batch) -> tuple[float, int]:
        """The loss's sum in nats and the number of targets, without gradients. `batch` is the
        same on all ranks, which share it."""
        ...

    def state(self) -> tuple[dict[str, Piece], dict[str, Any]]:
        """What this rank writes of the tensors that a checkpoint holds, and plain values."""
        ...

    def load_state(self, reader: Reader, values: dict[str, Any]) -> None: ...

    def adopt(self, weights: Reader) -> None:
        """Take the weights of another run, by the names of the parameters."""
        ...

    def close(self) -> None:
        """Let go of what outlives the process group otherwise."""
        ...

    def measured(self) -> tuple[nn.Module, list[Optimizer]]:
        """What `rostra.memory.measure` looks at."""
        ...
