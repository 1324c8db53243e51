"""The gradients of one process, with nobody to sum them with; and updates on the host."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from rostra.optim import MasterWeights
from rostra.parallel.held import Gradients, Held


class Single:
    """`named` trains; `master`, if any, holds what the optimizer updates in its place."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], master: MasterWeights | None = None
    ) -> None:
        self.master = master
        updated = named if master is None else master.named
        self.held = [
            Held(name, value, tuple(value.shape), (0,) * value.dim(), copies=1, written=True)
            for name, value in updated
        ]

    @property
    def masters(self) -> list[Held]:
        return [] if self.master is None or self.master.exact else self.held

    def so_far(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    def before(self, last: bool) -> None:
        pass

    def collect(self) -> None:
        if self.master is not None:
            self.master.collect()

    def publish(self) -> None:
        if self.master is not None:
            self.master.publish()

    def clear(self) -> None:
        for held in self.held:
            held.value.grad = None


class OnHost:
    """What `inner` holds, updated in host memory: masters, their states and the optimizer's
    step are there (ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840)."""

    def __init__(self, inner: Gradients) -> None:
        self.inner = inner
        named = [(held.name, held.value) for held in inner.held]
        self.master = MasterWeights(named, None, torch.device("cpu"))
        pairs = zip(inner.held, self.master.named, strict=True)
        self.held = [replace(held, value=value) for held, (_, value) in pairs]

    @property
    def masters(self) -> list[Held]:
        names = {held.name for held in self.inner.masters}
        return [held for held in self.held if held.name in names]

    def so_far(self, parameter: nn.Parameter) -> Tensor | None:
        return self.inner.so_far(parameter)

    def before(self, last: bool) -> None:
        self.inner.before(last)

    def collect(self) -> None:
        self.inner.collect()
        self.master.collect()

    def publish(self) -> None:
        self.master.publish()
        self.inner.publish()

    def clear(self) -> None:
        for held in self.held:
            held.value.grad = None
        self.inner.clear()
