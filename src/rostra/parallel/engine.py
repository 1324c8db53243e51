"""What the training step knows of whatever executes a layout."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from rostra.batch import Batch

State = tuple[dict[str, Tensor], dict[str, Any]]


class Engine(Protocol):
    """Executes a layout. The loss of a step is the sum over all target tokens of the global
    batch divided by their number, whatever the micro batches."""

    def forward_backward(self, batch: Batch) -> tuple[float, int]:
        """Gradients of the step's loss; returns the loss's sum in nats, and the targets."""
        ...

    def gradient_norm(self) -> float:
        """Euclidean norm of the gradients of the whole model, before clipping."""
        ...

    def step(self, accept: bool) -> float:
        """Clip, update (when accepted), clear; returns the learning rate that was used."""
        ...

    def forward(self, batch: Batch) -> tuple[float, int]:
        """The loss's sum in nats and the number of targets, without gradients."""
        ...

    def state(self) -> State:
        """Tensors and plain values that a checkpoint holds."""
        ...

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None: ...
