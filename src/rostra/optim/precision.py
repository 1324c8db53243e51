"""What half precision needs beside the optimizer: a loss scale, and master weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class LossScale:
    """Dynamic loss scaling (Micikevicius et al., 2018, arXiv:1710.03740, section 3.2).

    The loss is multiplied by `scale` so that small gradients survive in float16; the scale
    halves after a step that was not finite and doubles after `growth` good ones in a row.
    With `growth` 0 it stays as it is: at 1, for every other precision.
    """

    scale: float = 1.0
    growth: int = 0
    good: int = 0

    def update(self, accepted: bool) -> None:
        if self.growth == 0:
            return
        self.good = self.good + 1 if accepted else 0
        if not accepted:
            self.scale = max(1.0, self.scale / 2)
        elif self.good % self.growth == 0:
            self.scale *= 2

    def state(self) -> dict[str, Any]:
        return asdict(self)


class MasterWeights:
    """Float32 weights for the optimizer, while the model keeps them rounded to `dtype`.

    Buffers stay as they are: rotary frequencies in 16 bits would blur positions. Gradients
    move to the copies as soon as they exist, so that micro batches accumulate in float32 and
    no 16-bit gradient outlives its layer's backward pass.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], dtype: torch.dtype) -> None:
        self.pairs = [(p, nn.Parameter(p.detach().float())) for _, p in named]
        for parameter, _ in self.pairs:
            parameter.data = parameter.detach().to(dtype)
        self.named = [(name, m) for (name, _), (_, m) in zip(named, self.pairs, strict=True)]
        for parameter, master in self.pairs:
            parameter.register_post_accumulate_grad_hook(_mover(master))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies into the model."""
        for parameter, master in self.pairs:
            parameter.copy_(master)

    def state(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in self.named}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for name, master in self.named:
            master.copy_(tensors[name])


def _mover(master: nn.Parameter) -> Any:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return move
