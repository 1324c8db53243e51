"""AdamW whose states have 8 or 4 bits, by torchao and bitsandbytes, and their way into files.

Such a state is made of blocks of values with a scale each, value = table[code] x scale:
8 bits with a dynamic table (Dettmers et al., 2022, arXiv:2110.02861), 4 bits (Li et al., 2023,
arXiv:2309.01507), or float8 e4m3, which needs no table. A parameter of which some rank holds no
whole number of blocks, or fewer than 4,096 values, keeps float states.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from rostra.errors import RequestError
from rostra.layout import OptimizerStates
from rostra.pieces import cut

SMALLEST = 4096  # values; smaller parameters keep float states, as both libraries do
SLOTS = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign
BITSANDBYTES = {"exp_avg": 1, "exp_avg_sq": 2}  # the number in its names for the same


@dataclass(frozen=True)
class Format:
    """What torchao calls it, and the values that share a scale."""

    optimizer: str
    module: str
    tensor: str
    block: int


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter of `shape`: from `offset` on, as in `rostra.pieces.Piece`;
    `parts` ranks hold a part each. Low-bit states need parts of whole rows."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    parts: int = 1

    @classmethod
    def whole(cls, parameter: Tensor) -> Part:
        return cls(tuple(parameter.shape), (0,) * parameter.dim())

    def place(self, shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and offset in the whole of what `pack` gave of this part with `shape`: rows of
        codes or scales lie as the parameter's do."""
        if self.parts == 1:
            return tuple(shape), (0,) * len(shape)
        total, first = self.shape[0], self.offset[0]
        rows = max(1, min(ceil(total / self.parts), total - first))
        rest = (0,) * (len(shape) - 1)
        return (shape[0] * total // rows, *shape[1:]), (shape[0] * first // rows, *rest)

    def cut(self, value: Tensor, shape: torch.Size) -> Tensor:
        """This part, of `shape`, of `value`: of the whole, or already no more than this."""
        if value.numel() == shape.numel():
            return value.reshape(shape)
        if value.shape == self.shape:
            return cut(value, self.offset, tuple(shape))
        groups = value.shape[0]
        first = groups * self.offset[0] // self.shape[0]
        rows = shape.numel() * groups // value.numel()
        return value[first : first + rows].reshape(shape)


class Blocks(NamedTuple):
    """A low-bit state taken apart: value = qmap[code] x scale, or code x scale with no qmap."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor | None

    @property
    def kind(self) -> str:
        if self.qmap is None:
            return "fp8"
        return "int8" if self.qmap.numel() == 256 else "int4"

    def values(self) -> Tensor:
        """The float32 values, in one dimension."""
        codes = self.codes.flatten()
        if self.kind == "int4":  # two to a byte, the first in the high bits
            codes = torch.stack((codes >> 4, codes & 15), 1).flatten()
        table = self.qmap
        values = codes.float() if table is None else table.to(codes.device)[codes.int()]
        each = self.scale.to(codes.device).flatten()
        return values * each.repeat_interleave(FORMATS[self.kind].block)[: values.numel()]


FORMATS = {
    "int8": Format("AdamW8bit", "subclass_8bit", "OptimState8bit", 256),
    "int4": Format("AdamW4bit", "subclass_4bit", "OptimState4bit", 128),
    "fp8": Format("AdamWFp8", "subclass_fp8", "OptimStateFp8", 256),
}


def low_bit_adamw(
    groups: list[dict[str, Any]],
    states: OptimizerStates,
    held: Mapping[Tensor, Part],
    compiled: bool = False,
    **arguments: Any,
) -> Optimizer:
    """AdamW over `groups` with states of the kind `states`, about 2 bytes a parameter for int8
    and fp8 and 1 for int4, scales apart. `held` has the parameters that lie in parts, and
    `arguments` are AdamW's.

    int8 is bitsandbytes' for whole parameters on CUDA, which has kernels of its own, and
    torchao's for parts and on other devices; in a checkpoint their states are the same. int4
    and fp8 are torchao's everywhere, paged_int8 is bitsandbytes' on CUDA. `compiled`: let
    torchao compile its step, once for each shape; else it runs operation by operation, with
    temporary results of several times the largest parameter.

    Raises RequestError where a library is missing, or the device cannot do it.
    """
    parameters = [p for group in groups for p in group["params"]]
    elsewhere = sorted({p.device.type for p in parameters} - {"cuda"})
    whole = all(part.parts == 1 for part in held.values())
    if states == "paged_int8":
        if elsewhere or not whole:
            where = f"on {elsewhere[0]}" if elsewhere else "in parts"
            raise RequestError(
                "memory.optimizer_states = paged_int8: pages move between a CUDA device and its "
                f"host, and these parameters are {where}; use int8"
            )
        return _library("bitsandbytes.optim", states).PagedAdamW8bit(groups, **arguments)
    if states == "int8" and whole and not elsewhere:
        return _library("bitsandbytes.optim", states).AdamW8bit(groups, **arguments)
    return _torchao(states, held, compiled)(groups, **arguments)


def _library(module: str, states: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RequestError(
            f"memory.optimizer_states = {states}: cannot import {module.partition('.')[0]} "
            f'({error}); pip install "rostra[lowbit]", or use fp32'
        ) from error


def _torchao(states: OptimizerStates, held: Mapping[Tensor, Part], compiled: bool) -> type[Any]:
    """torchao's optimizer, compiled only when asked for, and with states made here: it would
    decide rank by rank whether a part is whole blocks, and what has codes on some ranks and
    floats on others could not be saved."""
    kind: Any = getattr(_library("torchao.optim", states), FORMATS[states].optimizer)

    class LowBitAdamW(kind):
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.prepare(parameter)
            if compiled:
                super().step(closure)
                return
            with torch.compiler.set_stance("force_eager"):
                super().step(closure)

        def prepare(self, parameter: Tensor) -> None:
            """States of zeros, unless there are some."""
            if parameter not in self.state:
                part = held.get(parameter, Part.whole(parameter))
                slots = {k: _zeros(parameter, part, states, signed) for k, signed in SLOTS.items()}
                self.state[parameter] = {"step": torch.tensor(0.0), **slots}

    return LowBitAdamW


def _zeros(parameter: Tensor, part: Part, states: OptimizerStates, signed: bool) -> Tensor:
    layout = FORMATS[states]
    if not _whole_blocks(part, layout.block):
        return torch.zeros_like(parameter, requires_grad=False)
    kind = getattr(_library(f"torchao.optim.{layout.module}", states), layout.tensor)
    arguments = {"device": parameter.device, "dtype": parameter.dtype}
    if states != "fp8":
        arguments["signed"] = signed
    zeros: Tensor = kind.zeros(parameter.shape, block_size=layout.block, **arguments)
    return zeros


def _whole_blocks(part: Part, block: int) -> bool:
    """Whether every rank holds whole blocks of the parameter, and enough of them."""
    rows, size = (part.shape[0], prod(part.shape[1:])) if part.shape else (1, 1)
    most = ceil(rows / part.parts)
    sizes = (most * size, (rows - most * (part.parts - 1)) * size)
    return all(n >= SMALLEST and n % block == 0 for n in sizes)


def pack(parameter: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    """The state of `parameter` in a low-bit optimizer as plain tensors: `step`, and for each
    moment KEY, or KEY.codes, KEY.scale and KEY.qmap.

    Scales, and codes of 4 bits, are [groups of rows, scales or codes of a group], a group
    being the fewest rows that are whole blocks: so parts of rows are parts of them, and make
    up what one process would have. Only bitsandbytes has a block that is not full, at the
    end: then scales have one dimension.
    """
    packed = {"step": torch.as_tensor(state["step"], dtype=torch.float32)}
    for key in SLOTS:
        value = _slot(state, key)
        if isinstance(value, Tensor):
            packed[key] = value
            continue
        packed[f"{key}.codes"] = value.codes.view(_codes_shape(parameter.shape, value.kind))
        packed[f"{key}.scale"] = value.scale.view(_scale_shape(parameter.shape, value.kind))
        if value.qmap is not None:
            packed[f"{key}.qmap"] = value.qmap
    return packed


def unpack(optimizer: Optimizer, parameter: Tensor, part: Part, saved: dict[str, Tensor]) -> None:
    """Give a low-bit optimizer the state that `pack` or torch's AdamW had of `parameter`: bit
    by bit where it has the same blocks now, else through float32 values. What is `saved` is
    whole, or of this part alone."""
    _prepare(optimizer, parameter)
    state, steps = optimizer.state[parameter], float(saved["step"])
    state["step"] = int(steps) if isinstance(state["step"], int) else torch.tensor(steps)
    for key in SLOTS:
        target, source = _slot(state, key), _saved(saved, key)
        if isinstance(target, Blocks) and isinstance(source, Blocks) and target.kind == source.kind:
            target.codes.copy_(part.cut(source.codes, target.codes.shape))
            target.scale.copy_(part.cut(source.scale, target.scale.shape))
            continue
        values = _floats(parameter, part, source).to(parameter.device)
        if isinstance(target, Blocks) and "state1" in state:
            _encode(values, target)
        else:  # torchao's tensors take values in by themselves
            (target if isinstance(target, Tensor) else state[key]).copy_(values)


def dequantized(parameter: Tensor, part: Part, saved: dict[str, Any]) -> dict[str, Any]:
    """`saved`, a state as `pack` gives it, as this part's with float32 values in place of
    codes: what torch's AdamW has. What is not of the parameter's shape stays as it is."""
    found = {k: v for k, v in saved.items() if "." not in k}
    for key, value in found.items():
        if isinstance(value, Tensor) and value.shape == part.shape:
            found[key] = part.cut(value, parameter.shape)
    for key in (k for k in SLOTS if f"{k}.codes" in saved):
        found[key] = _floats(parameter, part, _saved(saved, key))
    return found


def _saved(saved: dict[str, Any], key: str) -> Tensor | Blocks:
    if f"{key}.codes" not in saved:
        return cast(Tensor, saved[key])
    return Blocks(saved[f"{key}.codes"], saved[f"{key}.scale"], saved.get(f"{key}.qmap"))


def _floats(parameter: Tensor, part: Part, source: Tensor | Blocks) -> Tensor:
    if isinstance(source, Blocks):
        values = source.values()
        source = values.view(part.shape) if values.numel() == prod(part.shape) else values
    return part.cut(source, parameter.shape)


def _prepare(part: Any, parameter: Tensor) -> None:
    if hasattr(part, "prepare"):
        part.prepare(parameter)
    elif not part.state.get(parameter):
        for i, group in enumerate(part.param_groups):
            for j, other in enumerate(group["params"]):
                if other is parameter:
                    part.init_state(group, parameter, i, j)


def _slot(state: dict[str, Any], key: str) -> Tensor | Blocks:
    """A moment of either library."""
    if "state1" not in state:
        value: Any = state[key]
        if not hasattr(value, "codes"):
            return cast(Tensor, value)
        return Blocks(value.codes, value.scale, getattr(value, "qmap", None))
    number = BITSANDBYTES[key]
    codes: Tensor = state[f"state{number}"]
    if codes.dtype != torch.uint8:
        return codes
    return Blocks(codes, state[f"absmax{number}"], state[f"qmap{number}"])


def _codes_shape(shape: torch.Size, kind: str) -> torch.Size:
    if kind != "int4":
        return shape
    groups, values = _groups(shape, FORMATS[kind].block)
    return torch.Size((groups, values // 2))


def _scale_shape(shape: torch.Size, kind: str) -> torch.Size:
    block = FORMATS[kind].block
    groups, values = _groups(shape, block)
    if groups * values < shape.numel():
        return torch.Size((ceil(shape.numel() / block),))
    return torch.Size((groups, values // block))


def _groups(shape: torch.Size, block: int) -> tuple[int, int]:
    """The fewest rows that are whole blocks: how many such groups, and the values of one."""
    size = prod(shape[1:])
    rows = block // gcd(size, block)
    return shape[0] // rows, rows * size


def _encode(values: Tensor, into: Blocks) -> None:
    library: Any = importlib.import_module("bitsandbytes.functional")
    block = FORMATS["int8"].block
    codes, found = library.quantize_blockwise(values.float(), code=into.qmap, blocksize=block)
    into.codes.copy_(codes)
    into.scale.copy_(found.absmax)
