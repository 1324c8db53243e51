"""The engine on PyTorch alone: any layout of data, sharding, tensor, context and pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from rostra.batch import Batch
from rostra.layout import Layout
from rostra.models import evaluating
from rostra.optim import LossScale, Optimizers, Schedule
from rostra.parallel.held import Gradients, gradient_norm
from rostra.parallel.mesh import DATA, Mesh
from rostra.parallel.sharded import reshard
from rostra.parallel.stage import Stage
from rostra.parallel.states import load_pieces, pieces
from rostra.pieces import Piece, Reader

SAMPLED = ("pipeline", "replicate", "shard", "context")  # along these, parts of the loss lie


class Execute(Protocol):
    """Runs the micro batches of a rank through its stages."""

    def __call__(self, parts: Sequence[Batch], backward: bool) -> None: ...


class Accumulate:
    """One micro batch after the other, through the whole model."""

    def __init__(self, stage: Stage, before: Callable[[bool], None]) -> None:
        self.stage, self.before = stage, before

    def __call__(self, parts: Sequence[Batch], backward: bool) -> None:
        for index, part in enumerate(parts):
            self.before(index == len(parts) - 1)
            loss = self.stage(**part.tensors())
            if backward:
                loss.backward()
        if not backward:
            reshard([self.stage])


@dataclass
class TorchEngine:
    """Executes a layout on this rank; the parameters it holds are where `mesh.device` is."""

    stages: list[Stage]
    execute: Execute
    gradients: Gradients
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
        return self.stages[0].model

    @property
    def place(self) -> tuple[int, int]:
        return self.mesh.coordinate(*DATA), self.mesh.size(*DATA)

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def forward_backward(self, batch: Batch) -> tuple[float, int]:
        count = torch.tensor(batch.targets, dtype=torch.int64, device=self.device)
        targets = int(self.mesh.sum(count, *DATA))
        parts = list(batch.padded(self.rows).micro_batches(self.layout.micro_batch))
        total = self._run(parts, self.scale.scale / max(1, targets), backward=True)
        self.gradients.collect()
        return float(total), targets  # read at the end: reading waits for the device

    def gradient_norm(self) -> float:
        self._norm = gradient_norm(self.gradients.held, self.mesh) / self.scale.scale
        return self._norm

    def step(self, accept: bool) -> float:
        self.optimizers.set_fraction(self.schedule(self.steps))
        if accept:
            factor = 1 / self.scale.scale
            if self.clip is not None and self._norm > self.clip:
                factor *= self.clip / self._norm
            grads = [held.value.grad for held in self.gradients.held]
            if factor != 1:
                torch._foreach_mul_([grad for grad in grads if grad is not None], factor)
            self.optimizers.step()
            self.gradients.publish()
        self.gradients.clear()
        self.scale.update(accept)
        self.steps += 1
        return self.optimizers.learning_rate

    @torch.no_grad()
    def forward(self, batch: Batch) -> tuple[float, int]:
        share = batch.share(*self.place)
        with evaluating(*self.stages):
            parts = list(share.micro_batches(self.layout.micro_batch))
            return float(self._run(parts, 1.0, backward=False)), batch.targets

    def _run(self, parts: Sequence[Batch], factor: float, backward: bool) -> Tensor:
        """The loss's sum over all ranks."""
        for stage in self.stages:
            stage.begin(factor)
        self.execute([part.to(self.device) for part in parts], backward)
        total = torch.stack([stage.sum(self.device) for stage in self.stages]).sum()
        return self.mesh.sum(total, *SAMPLED)

    def state(self) -> tuple[dict[str, Piece], dict[str, Any]]:
        found, values = pieces(self.stages, self.gradients, self.optimizers, self.mesh)
        return found, {"optimizer": values, "scale": self.scale.state(), "steps": self.steps}

    def adopt(self, weights: Reader) -> None:
        """Take the weights of another run, by the names of the parameters."""
        load_pieces(self.stages, self.gradients, None, weights, {})

    def load_state(self, reader: Reader, values: dict[str, Any]) -> None:
        load_pieces(self.stages, self.gradients, self.optimizers, reader, values["optimizer"])
        if "scale" in values:
            self.scale = LossScale(**values["scale"])
        self.steps = values["steps"]

    def close(self) -> None:
        pass

    def measured(self) -> tuple[nn.Module, list[Optimizer]]:
        return nn.ModuleList(self.stages), self.optimizers.parts
