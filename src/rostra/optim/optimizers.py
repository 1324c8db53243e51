"""Optimizers over the named parameters of a model, behind one small class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from rostra.config.schema import OptimizerSection

Named = list[tuple[str, nn.Parameter]]


class Lion(Optimizer):
    """The sign of interpolated momentum (Chen et al., 2023, arXiv:2302.06675, program 1).

    c = b1 m + (1 - b1) g;  w -= lr (sign(c) + decay w);  m = b2 m + (1 - b2) g.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = [cast(Tensor, p.grad) for p in params]
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            momenta = [self.state[p]["exp_avg"] for p in params]
            update = torch._foreach_lerp(grads, momenta, beta1)
            torch._foreach_sign_(update)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, update, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 1 - beta2)


class Optimizers:
    """One or more torch optimizers that step together.

    `set_fraction` scales each group's own learning rate. The state is kept by the names of
    the parameters, so that it does not depend on their order or on who holds them.
    """

    def __init__(self, parts: list[Optimizer], names: dict[Tensor, str]) -> None:
        self.parts = parts
        self._names = names
        for group in self._groups():
            group["peak_lr"] = group["lr"]

    def _groups(self) -> Iterable[dict[str, Any]]:
        return (group for part in self.parts for group in part.param_groups)

    @property
    def learning_rate(self) -> float:
        """The one of the first group."""
        return float(next(iter(self._groups()))["lr"])

    def set_fraction(self, fraction: float) -> None:
        for group in self._groups():
            group["lr"] = group["peak_lr"] * fraction

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values, each under `PARAMETER/KEY`."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for part in self.parts:
            for parameter, state in part.state.items():
                for key, value in state.items():
                    name = f"{self._names[parameter]}/{key}"
                    (tensors if isinstance(value, Tensor) else values)[name] = value
        return tensors, values

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        owners = {
            self._names[p]: (part, p)
            for part in self.parts
            for group in part.param_groups
            for p in group["params"]
        }
        for name, value in {**tensors, **values}.items():
            parameter, key = name.rsplit("/", 1)
            part, p = owners[parameter]
            # a fused optimizer counts its steps on the device, others on the CPU
            here = isinstance(value, Tensor) and (value.dim() or part.defaults.get("fused"))
            part.state[p][key] = value.to(p.device) if here else value


def make_optimizers(section: OptimizerSection, named: Named, embeddings: set[str]) -> Optimizers:
    """The optimizer of the config over `named`, the parameters that train.

    Decay applies to matrices only: norms and biases have no scale to shrink. `embeddings`
    names the input and output embeddings, which Muon leaves to AdamW: it is made for
    matrices that map one hidden space to another (Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon/).
    """
    names: dict[Tensor, str] = {p: name for name, p in named}
    if section.name == "muon":
        matrices = [p for name, p in named if p.dim() == 2 and name not in embeddings]
        rest = [(name, p) for name, p in named if p.dim() != 2 or name in embeddings]
        muon = Muon(
            matrices,
            lr=section.matrix_learning_rate,
            momentum=section.momentum,
            weight_decay=section.weight_decay,
        )
        others = [_single(section, rest, "adamw")] if rest else []
        return Optimizers([muon, *others], names)
    return Optimizers([_single(section, named, section.name)], names)


def _single(section: OptimizerSection, named: Named, name: str) -> Optimizer:
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate, betas = section.learning_rate, (section.beta1, section.beta2)
    if name == "adamw":
        return AdamW(groups, lr=rate, betas=betas, eps=section.epsilon, fused=True)
    if name == "sgd":
        return SGD(groups, lr=rate, momentum=section.momentum)
    if name == "lion":
        return Lion(groups, rate, betas, section.weight_decay)
    return Adafactor(groups, lr=rate)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The Euclidean norm of all gradients together, in float32."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return 0.0
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    return float(torch.linalg.vector_norm(torch.stack(norms)))
