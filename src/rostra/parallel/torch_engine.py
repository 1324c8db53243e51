"""The engine on PyTorch alone: any layout of data, sharding, tensor, context and pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rostra.batch import Batch
from rostra.optim import LossScale
from rostra.parallel.engine import MeshEngine
from rostra.parallel.held import Gradients, gradient_norm
from rostra.parallel.sharded import reshard
from rostra.parallel.stage import Stage
from rostra.parallel.states import load_pieces, pieces
from rostra.pieces import Piece, Reader


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


@dataclass(kw_only=True)
class TorchEngine(MeshEngine):
    """Executes any layout on this rank."""

    execute: Execute
    gradients: Gradients

    def _execute(self, parts: list[Batch], backward: bool) -> None:
        self.execute(parts, backward)
        if backward:
            self.gradients.collect()

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

    def state(self) -> tuple[Iterable[dict[str, Piece]], dict[str, Any]]:
        found, values = pieces(self.stages, self.gradients, self.optimizers, self.mesh)
        return [found], {"optimizer": values, "scale": self.scale.state(), "steps": self.steps}

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
