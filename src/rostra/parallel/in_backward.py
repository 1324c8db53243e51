"""The optimizer in the backward pass: a gradient is used and freed as soon as it is complete,
so that at no time all of them exist (LOMO: Lv et al., 2023, arXiv:2306.09782).

It needs one backward pass a step in one process, no clipping and no loss scale: those wait for
all gradients (`rostra.layout.RULES`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rostra.batch import Batch
from rostra.config.schema import OptimizerSection
from rostra.errors import TrainingFailed
from rostra.layout import OptimizerStates
from rostra.optim import Optimizers, make_optimizers
from rostra.parallel.torch_engine import TorchEngine


def optimizers_by_parameter(
    section: OptimizerSection,
    named: list[tuple[str, nn.Parameter]],
    embeddings: set[str],
    states: OptimizerStates = "fp32",
    compiled: bool = False,
    ratio: float | None = None,
) -> Optimizers:
    """What `make_optimizers` makes, with a torch optimizer for each parameter: the same steps,
    and the same state by name."""
    alone = [
        make_optimizers(section, [one], embeddings, states, compiled, ratio=ratio) for one in named
    ]
    names: dict[Tensor, str] = {p: name for name, p in named}
    return Optimizers([part for each in alone for part in each.parts], names, states)


class StepInBackward:
    """Updates each parameter of `optimizers` when its gradient is complete.

    Tied weights are one parameter: autograd adds up all their uses before it hands the
    gradient out, and nothing reads the weights after.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self.optimizers = optimizers
        self._squares: list[Tensor] = []

    @contextmanager
    def updating(self, fraction: float) -> Iterator[None]:
        """Around the one backward pass of a step, at `fraction` of the learning rates.

        Hooks are there only inside, so that other backward passes change nothing, and behind
        those that were registered before, such as `rostra.memory.measure`'s.
        """
        self.optimizers.set_fraction(fraction)
        self._squares.clear()
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._stepper(part))
            for part in self.optimizers.parts
            for group in part.param_groups
            for parameter in group["params"]
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _stepper(self, part: Optimizer) -> Callable[[Tensor], None]:
        def step(parameter: Tensor) -> None:
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            self._squares.append(norm.square())
            part.step()
            parameter.grad = None

        return step

    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients of the last `updating`, as they were."""
        return float(torch.stack(self._squares).sum().sqrt()) if self._squares else 0.0

    def finish(self, accept: bool) -> float:
        """In place of the optimizer's step; returns the learning rate that was used.

        Raises TrainingFailed for a step that should not have been taken.
        """
        if not accept:
            raise TrainingFailed(
                "the loss or a gradient is not finite, and memory.optimizer_in_backward has used "
                "it already; go on from the last checkpoint with a lower "
                "optimizer.learning_rate, or without memory.optimizer_in_backward, which can "
                "pass over such a step"
            )
        return self.optimizers.learning_rate


@dataclass(kw_only=True)
class InBackwardEngine(TorchEngine):
    """One process whose optimizer steps in the backward pass."""

    def __post_init__(self) -> None:
        self.updates = StepInBackward(self.optimizers)

    def forward_backward(self, batch: Batch) -> tuple[float, float]:
        with self.updates.updating(self.schedule(self.steps)):
            return super().forward_backward(batch)

    def gradient_norm(self) -> float:
        return self.updates.gradient_norm()

    def step(self, accept: bool) -> float:
        rate = self.updates.finish(accept)
        self.steps += 1
        return rate
