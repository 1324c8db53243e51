"""The engine on PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rostra.batch import Batch
from rostra.layout import Layout
from rostra.models import evaluating
from rostra.optim import LossScale, MasterWeights, Optimizers, Schedule, gradient_norm

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

# From a micro batch and the factor of its gradients: the scaled loss and the plain sum.
Loss = Callable[[PreTrainedModel, Batch, float], tuple[Tensor, Tensor]]


@dataclass
class TorchEngine:
    """One process; the model's parameters are where `device` is."""

    model: PreTrainedModel
    loss: Loss
    optimizers: Optimizers
    schedule: Schedule
    layout: Layout
    device: torch.device
    clip: float | None
    scale: LossScale
    master: MasterWeights | None = None
    steps: int = 0
    _norm: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        trains = [p for p in self.model.parameters() if p.requires_grad]
        self._updated: list[nn.Parameter] = (
            trains if self.master is None else [m for _, m in self.master.named]
        )

    def forward_backward(self, batch: Batch) -> tuple[float, int]:
        targets = batch.targets
        factor = self.scale.scale / max(1, targets)
        sums = []
        for part in batch.micro_batches(self.layout.micro_batch):
            with self._autocast():
                scaled, plain = self.loss(self.model, part.to(self.device), factor)
            scaled.backward()
            sums.append(plain)
        return sum(map(float, sums)), targets  # read at the end: reading waits for the device

    def gradient_norm(self) -> float:
        self._norm = gradient_norm(self._updated) / self.scale.scale
        return self._norm

    def step(self, accept: bool) -> float:
        self.optimizers.set_fraction(self.schedule(self.steps))
        if accept:
            factor = 1 / self.scale.scale
            if self.clip is not None and self._norm > self.clip:
                factor *= self.clip / self._norm
            if factor != 1:
                torch._foreach_mul_([p.grad for p in self._updated if p.grad is not None], factor)
            self.optimizers.step()
            if self.master is not None:
                self.master.publish()
        self.optimizers.zero_grad()
        self.scale.update(accept)
        self.steps += 1
        return self.optimizers.learning_rate

    @torch.no_grad()
    def forward(self, batch: Batch) -> tuple[float, int]:
        with evaluating(self.model), self._autocast():
            sums = [
                self.loss(self.model, part.to(self.device), 1.0)[1]
                for part in batch.micro_batches(self.layout.micro_batch)
            ]
        return sum(map(float, sums)), batch.targets

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.layout.compute)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"model/{k}": v for k, v in _weights(self.model).items()}
        optimizer, values = self.optimizers.state()
        tensors |= {f"optimizer/{k}": v for k, v in optimizer.items()}
        if self.master is not None:
            tensors |= {f"master/{k}": v for k, v in self.master.state().items()}
        return tensors, {"optimizer": values, "scale": self.scale.state(), "steps": self.steps}

    def adopt(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of another run, by the names of the parameters."""
        load_weights(self.model, weights)
        if self.master is not None:
            self.master.load_state(weights)

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        def part(kind: str) -> dict[str, Tensor]:
            start = f"{kind}/"
            return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}

        load_weights(self.model, part("model"))
        self.optimizers.load_state(part("optimizer"), values["optimizer"])
        if self.master is not None:
            self.master.load_state(part("master"))
        self.scale = LossScale(**values["scale"])
        self.steps = values["steps"]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name; tied ones once, under their first name."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in saved}
    return {name: p.detach() for name, p in model.named_parameters()} | buffers


@torch.no_grad()
def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy `tensors` into the model in place, so that optimizers keep their parameters."""
    own = _weights(model)
    if set(own) != set(tensors):
        raise ValueError(f"weights do not fit the model: {sorted(set(own) ^ set(tensors))[:3]}")
    for name, value in own.items():
        value.copy_(tensors[name])
