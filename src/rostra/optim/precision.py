"""What half precision needs beside the optimizer: a loss scale, and master weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
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


EXACT = (torch.float32, torch.float32)  # before and after rounding


class MasterWeights:
    """Float32 weights for the optimizer, while the model keeps its own.

    The model's are rounded to `dtype`, or stay as they are with None. Masters lie on `device`,
    or on the model's with None: on the host, the optimizer's states live and its steps run
    there too (ZeRO-Offload: Ren et al., 2021, arXiv:2101.06840). Where nothing differs, a
    master is the parameter itself.

    Buffers stay as they are: rotary frequencies in 16 bits would blur positions. Gradients
    move to the masters as soon as they exist, so that micro batches accumulate in float32 and
    no gradient of the model outlives its layer's backward pass. From CUDA to the host they are
    copied beside the computation: `collect` before reading them. `exact`: the model's weights are
    float32 too, and equal to the masters between steps.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        dtype: torch.dtype | None,
        device: torch.device | None = None,
    ) -> None:
        self.pairs = [(p, _master(p, dtype, device or p.device)) for _, p in named]
        self.named = [(name, m) for (name, _), (_, m) in zip(named, self.pairs, strict=True)]
        self.exact = all((dtype or p.dtype) == torch.float32 for p, _ in self.pairs)
        self._beside: torch.cuda.Stream | None = None
        for parameter, master in self.pairs:
            if dtype is not None:
                parameter.data = parameter.detach().to(dtype)
            if parameter.device.type == "cuda" and master.device.type == "cpu":
                self._beside = self._beside or torch.cuda.Stream(parameter.device)
            if parameter is not master:
                parameter.register_post_accumulate_grad_hook(self._mover(master))

    def _mover(self, master: nn.Parameter) -> Callable[[Tensor], None]:
        """Knows `self` weakly: a parameter that held what holds it would never be freed."""
        masters = weakref.ref(self)

        def move(parameter: Tensor) -> None:
            if (own := masters()) is not None:
                own._move(parameter, master)

        return move

    def _move(self, parameter: Tensor, master: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self._beside is not None and master.device.type == "cpu":
            _copy_beside(gradient, master, self._beside)
        elif master.grad is None:
            master.grad = gradient.to(master.device, torch.float32)
        else:
            master.grad += gradient.to(master.device)

    def collect(self) -> None:
        """After the backward pass: all gradients are in the masters, those too that something
        else than autograd has put into the parameters."""
        for parameter, master in self.pairs:
            if parameter is not master and parameter.grad is not None:
                self._move(parameter, master)
        if self._beside is not None:
            self._beside.synchronize()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the masters into the model, rounded."""
        for parameter, master in self.pairs:
            if parameter is not master:
                parameter.copy_(master, non_blocking=True)
        if self._beside is not None:  # the next step may change the masters only after
            self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))


def _master(
    parameter: nn.Parameter, dtype: torch.dtype | None, device: torch.device
) -> nn.Parameter:
    own = parameter.detach()
    if parameter.device.type == "cuda" and device.type == "cpu":
        pinned = torch.empty(own.shape, dtype=torch.float32, pin_memory=True)
        return nn.Parameter(pinned.copy_(own))
    if parameter.device == device and (parameter.dtype, dtype or torch.float32) == EXACT:
        return parameter
    return nn.Parameter(own.to(device, torch.float32))


def _copy_beside(gradient: Tensor, master: nn.Parameter, beside: torch.cuda.Stream) -> None:
    """Add `gradient` to the master's on the host, in the order of a stream of its own: the sum
    with earlier micro batches is taken on the device, so that the host never waits."""
    beside.wait_stream(torch.cuda.current_stream(gradient.device))
    with torch.cuda.stream(beside):
        total = gradient.float()
        if master.grad is None:
            master.grad = torch.empty_like(master, pin_memory=True)
        else:
            total = total + master.grad.to(gradient.device, non_blocking=True)
        master.grad.copy_(total, non_blocking=True)
    gradient.record_stream(beside)
