"""Optimizers over the named parameters of a model, behind one small class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from rostra.config.schema import OptimizerSection
from rostra.errors import RequestError
from rostra.layout import OptimizerStates
from rostra.optim.low_bit import Part, dequantized, low_bit_adamw, pack, unpack

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
    the parameters, so that it does not depend on their order or on who holds them. `states` is
    the kind of the states of all `parts`; `held` says what lies in parts on several ranks.
    """

    def __init__(
        self,
        parts: list[Optimizer],
        names: dict[Tensor, str],
        states: OptimizerStates = "fp32",
        held: Mapping[Tensor, Part] | None = None,
    ) -> None:
        self.parts = parts
        self.names = names
        self.states = states
        self.held = held or {}
        for group in self._groups():
            group["peak_lr"] = float(group["lr"])

    def _groups(self) -> Iterable[dict[str, Any]]:
        return (group for part in self.parts for group in part.param_groups)

    @property
    def learning_rate(self) -> float:
        """The one of the first group; 0 where nothing trains, in a stage of frozen layers."""
        return next((float(group["lr"]) for group in self._groups()), 0.0)

    def set_fraction(self, fraction: float) -> None:
        for group in self._groups():
            rate = group["peak_lr"] * fraction
            # torchao keeps it in a tensor, for compiled code to read
            group["lr"] = torch.tensor(rate) if isinstance(group["lr"], Tensor) else rate

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values, each under `PARAMETER/KEY`; what low-bit states are made of
        under `PARAMETER/KEY.INNER`."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for part in self.parts:
            for parameter, state in part.state.items():
                packed = state if self.states == "fp32" else pack(parameter, state)
                for key, value in packed.items():
                    name = f"{self.names[parameter]}/{key}"
                    (tensors if isinstance(value, Tensor) else values)[name] = value
        return tensors, values

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take what `state` gave, of low-bit states or not: they are converted where the kind
        changed. Codes and scales may be whole where a parameter is a part."""
        saved: dict[str, dict[str, Any]] = {}
        for name, value in {**tensors, **values}.items():
            parameter, key = name.rsplit("/", 1)
            saved.setdefault(parameter, {})[key] = value
        owners = {
            self.names[p]: (part, p)
            for part in self.parts
            for group in part.param_groups
            for p in group["params"]
        }
        for name, state in saved.items():
            part, p = owners[name]
            held = self.held.get(p, Part.whole(p))
            if self.states != "fp32":
                unpack(part, p, held, state)
                continue
            for key, value in dequantized(p, held, state).items():
                # a fused optimizer counts its steps on the device, others on the CPU
                here = isinstance(value, Tensor) and (value.dim() or part.defaults.get("fused"))
                device = p.device if here else None
                copied = isinstance(value, Tensor)  # what steps change is not the caller's
                part.state[p][key] = value.to(device, copy=True) if copied else value


def make_optimizers(
    section: OptimizerSection,
    named: Named,
    embeddings: set[str],
    states: OptimizerStates = "fp32",
    compiled: bool = False,
    held: Mapping[str, Part] | None = None,
    ratio: float | None = None,
) -> Optimizers:
    """The optimizer of the config over `named`, the parameters that train.

    Decay applies to matrices only: norms and biases have no scale to shrink. `embeddings`
    names the input and output embeddings, which Muon leaves to AdamW: it is made for
    matrices that map one hidden space to another (Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon/). `states` of fewer bits are AdamW's, and
    `compiled` says whether torchao compiles its step: see `low_bit_adamw`. `held` has what lies
    in parts, by name; `ratio` is that of LoRA+.
    """
    if not named:
        return Optimizers([], {})
    names: dict[Tensor, str] = {p: name for name, p in named}
    parts: dict[Tensor, Part] = {p: (held or {}).get(name) or Part.whole(p) for name, p in named}
    if states != "fp32":
        low_bit = _low_bit(section, named, states, parts, compiled, ratio)
        return Optimizers([low_bit], names, states, parts)
    if section.name == "muon":
        matrices = [p for name, p in named if p.dim() == 2 and name not in embeddings]
        rest = [(name, p) for name, p in named if p.dim() != 2 or name in embeddings]
        rate, decay = section.matrix_learning_rate, section.weight_decay
        muon = (
            [Muon(matrices, lr=rate, momentum=section.momentum, weight_decay=decay)]
            if matrices
            else []
        )
        others = [_single(section, rest, "adamw", parts, ratio)] if rest else []
        return Optimizers([*muon, *others], names, held=parts)
    return Optimizers([_single(section, named, section.name, parts, ratio)], names, held=parts)


def _groups_of(
    section: OptimizerSection, named: Named, held: Mapping[Tensor, Part], ratio: float | None
) -> list[dict[str, Any]]:
    """With and without decay; what counts is the whole parameter, also of a flat stretch. LoRA's
    second matrices learn `ratio` times as fast (LoRA+: Hayou et al. 2024, arXiv:2402.12354)."""
    groups: list[dict[str, Any]] = []
    for decays in (True, False):
        for fast in (False, True):
            chosen = [
                p
                for name, p in named
                if (sum(size > 1 for size in held[p].shape) >= 2) == decays
                and (ratio is not None and ".lora_B." in name) == fast
            ]
            group: dict[str, Any] = {
                "params": chosen,
                "weight_decay": section.weight_decay if decays else 0.0,
            }
            if ratio is not None and fast:
                group["lr"] = section.learning_rate * ratio
            groups.append(group)
    return [group for group in groups if group["params"]]


def _low_bit(
    section: OptimizerSection,
    named: Named,
    states: OptimizerStates,
    held: Mapping[Tensor, Part],
    compiled: bool,
    ratio: float | None,
) -> Optimizer:
    if section.name != "adamw":
        raise RequestError(
            f"memory.optimizer_states = {states}: these are states of AdamW, and optimizer.name "
            f"is {section.name}; use fp32, or optimizer.name: adamw"
        )
    return low_bit_adamw(
        _groups_of(section, named, held, ratio),
        states,
        held,
        compiled,
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
    )


def _single(
    section: OptimizerSection,
    named: Named,
    name: str,
    held: Mapping[Tensor, Part],
    ratio: float | None,
) -> Optimizer:
    groups = _groups_of(section, named, held, ratio)
    rate, betas = section.learning_rate, (section.beta1, section.beta2)
    if name == "adamw":
        return AdamW(groups, lr=rate, betas=betas, eps=section.epsilon, fused=True)
    if name == "sgd":
        return SGD(groups, lr=rate, momentum=section.momentum)
    if name == "lion":
        return Lion(groups, rate, betas, section.weight_decay)
    return Adafactor(groups, lr=rate)
