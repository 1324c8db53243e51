"""What the training step knows of whatever executes a layout, and what all engines do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from rostra.batch import Batch
from rostra.layout import Layout
from rostra.models import evaluating
from rostra.optim import LossScale, Optimizers, Schedule
from rostra.parallel.mesh import DATA, Mesh
from rostra.parallel.stage import Stage
from rostra.pieces import Piece, Reader

SAMPLED = ("pipeline", "replicate", "shard", "context")  # along these, parts of the loss lie


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

    def forward_backward(self, batch: Batch) -> tuple[float, float]:
        """Gradients of the step's loss, from this rank's samples of the global batch; returns
        the loss's sum in nats over all of it, and its weight: its targets, if all count 1."""
        ...

    def gradient_norm(self) -> float:
        """Euclidean norm of the gradients of the whole model, before clipping."""
        ...

    def step(self, accept: bool) -> float:
        """Clip, update (when accepted), clear; returns the learning rate that was used."""
        ...

    def forward(self, batch: Batch) -> tuple[float, float]:
        """The loss's sum in nats and the batch's weight, without gradients. `batch` is the
        same on all ranks, which share it."""
        ...

    def state(self) -> tuple[Iterable[dict[str, Piece]], dict[str, Any]]:
        """What this rank writes of the tensors that a checkpoint holds, in groups, each of them
        there until the next is asked for; and plain values."""
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


@dataclass(kw_only=True)
class MeshEngine(ABC):
    """What engines share: where a rank stands, and its micro batches through its stages.

    The parameters of the `stages` that this rank holds are where `mesh.device` is.
    """

    stages: list[Stage]
    optimizers: Optimizers
    schedule: Schedule
    layout: Layout
    shape: PretrainedConfig  # of the whole model
    mesh: Mesh
    clip: float | None
    scale: LossScale
    rows: int = 0  # samples that every rank runs at least: those with fewer run empty ones
    steps: int = 0
    _norm: float = field(default=0.0, init=False)

    @property
    def model(self) -> PreTrainedModel:
        """Of the first of this rank's stages."""
        return self.stages[0].model

    @property
    def place(self) -> tuple[int, int]:
        return self.mesh.coordinate(*DATA), self.mesh.size(*DATA)

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def forward_backward(self, batch: Batch) -> tuple[float, float]:
        kind = torch.int64 if batch.weights is None else torch.float64
        count = torch.tensor(batch.weight, dtype=kind, device=self.device)
        weight = self.mesh.sum(count, *DATA).item()
        factor = self.scale.scale / (weight or 1)
        return self._run(batch.padded(self.rows), factor, backward=True), weight

    @torch.no_grad()
    def forward(self, batch: Batch) -> tuple[float, float]:
        with evaluating(*self.stages):
            return self._run(batch.share(*self.place), 1.0, backward=False), batch.weight

    def _run(self, batch: Batch, factor: float, backward: bool) -> float:
        """The loss's sum over all ranks; `factor` is that of the gradients."""
        for stage in self.stages:
            stage.begin(factor, self.steps)
        micro = batch.to(self.device).micro_batches(self.layout.micro_batch)
        self._execute(list(micro), backward)
        total = torch.stack([stage.sum(self.device) for stage in self.stages]).sum()
        return float(self.mesh.sum(total, *SAMPLED))

    @abstractmethod
    def _execute(self, parts: list[Batch], backward: bool) -> None:
        """Run micro batches; after `backward`, gradients are sums over all ranks."""

    def measured(self) -> tuple[nn.Module, list[Optimizer]]:
        return nn.ModuleList(self.stages), self.optimizers.parts
