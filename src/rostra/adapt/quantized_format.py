"""How a matrix lies in four or eight bits: its stored tensors, made from it and back.

kind   a number is one of            scale            bits a number (double)
nf4    16 quantiles of a normal      of 64 in a row   4.5 (4.127)
fp4    16 floats of four bits        of 64 in a row   4.5 (4.127)
int8   255 equal steps               of a row         8

NF4 and the double quantisation, in which the scales lie in eight bits with a scale for 256 of
them: Dettmers et al. 2023, QLoRA, arXiv:2305.14314, by bitsandbytes' kernels. INT8 by rows:
Dettmers et al. 2022, arXiv:2208.07339, without its outlier columns.

All stored tensors are of integers. Floats among them lie as the int32 of the same bits, so that
nothing that casts a model's floats on its way (mixed precision under sharding, `model.to`)
changes a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["nf4", "fp4", "int8"]
Rows = Callable[[int, int], Tensor]  # rows start to stop of a matrix

BLOCK, GROUP, CODES = 64, 256, 256  # numbers a scale, scales a scale of scales, its codes
_CHUNK = 1 << 22  # numbers that are quantised at once
_SLICE = 1 << 20  # and dequantised, of int8
_FLOAT, _BITS = torch.float32, torch.int32


@dataclass(frozen=True)
class Format:
    """What a matrix of `shape` [out, in] is stored as."""

    kind: Kind
    double: bool  # nf4, fp4 only
    shape: tuple[int, int]

    @property
    def four_bits(self) -> bool:
        return self.kind != "int8"

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each stored tensor, in the order that `dequantize` takes.

        `packed`: [out, in / 2] of two numbers a byte, the first in the upper half, or [out, in].
        `scales`: the largest magnitude of each block, a block every 64 numbers of the flattened
        matrix; int8: of each row. Doubled: `scales` are codes, `nested` the scale of each 256 of
        them and, last, their mean, and `code` the 256 values of a code.
        """
        rows, columns = self.shape
        if not self.four_bits:
            return {"packed": (self.shape, torch.int8), "scales": ((rows,), _BITS)}
        blocks = -(-rows * columns // BLOCK)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "packed": ((rows, columns // 2), torch.uint8),
            "scales": ((blocks,), torch.uint8 if self.double else _BITS),
        }
        if self.double:
            found["nested"] = ((-(-blocks // GROUP) + 1,), _BITS)
            found["code"] = ((CODES,), _BITS)
        return found


@torch.no_grad()
def quantize(form: Format, read: Rows) -> dict[str, Tensor]:
    """The stored tensors of the matrix whose rows `read` gives, in any float type, on the CPU.

    Some rows are read at a time, so that the matrix need never exist; the result is that of
    quantising it whole.
    """
    rows, columns = form.shape
    step = max(BLOCK, _CHUNK // columns // BLOCK * BLOCK)  # so that no block is cut
    shape, dtype = form.tensors()["packed"]
    packed, scales = torch.empty(shape, dtype=dtype), []
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        part, scale = _quantized(form, read(start, stop))
        packed[start:stop] = part.view(stop - start, -1)
        scales.append(scale)
    whole = torch.cat(scales)
    if not form.double or not form.four_bits:
        return {"packed": packed, "scales": whole.view(_BITS)}
    return {"packed": packed, **_doubled(whole)}


def _quantized(form: Format, weight: Tensor) -> tuple[Tensor, Tensor]:
    from bitsandbytes.functional import quantize_4bit

    if form.four_bits:
        packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type=form.kind)
        return packed, state.absmax
    scale = weight.abs().amax(1).float() / 127
    steps = weight.float() / scale.clamp(min=torch.finfo(_FLOAT).tiny)[:, None]
    return steps.round_().to(torch.int8), scale


def _doubled(scales: Tensor) -> dict[str, Tensor]:
    """Scales in eight bits, around their mean."""
    from bitsandbytes.functional import quantize_blockwise

    mean = scales.mean()
    codes, state = quantize_blockwise(scales - mean, blocksize=GROUP)
    nested = torch.cat([state.absmax, mean[None]])
    return {"scales": codes, "nested": nested.view(_BITS), "code": state.code.view(_BITS)}


def constant_code() -> Tensor:
    """The values of the 256 codes of scales, the same for all: `code`."""
    from bitsandbytes.functional import create_dynamic_map

    code: Tensor = create_dynamic_map()
    return code.view(_BITS)


@torch.no_grad()
def dequantize(kind: str, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] in `dtype` (float32, bfloat16 or float16), from its stored tensors
    in their order, on whatever device they are."""
    import bitsandbytes  # noqa: F401  # registers the operations

    packed, scales, *double = stored
    if kind == "int8":
        return _of_rows(packed, scales.view(_FLOAT), dtype)
    operations = torch.ops.bitsandbytes
    if double:
        nested, code = (bits.view(_FLOAT) for bits in double)
        scales = operations.dequantize_blockwise(scales, nested[:-1], code, GROUP, _FLOAT)
        scales = scales + nested[-1]
    else:
        scales = scales.view(_FLOAT)
    shape = (packed.shape[0], 2 * packed.shape[1])
    matrix: Tensor = operations.dequantize_4bit(packed, scales, BLOCK, kind, shape, dtype)
    return matrix


def _of_rows(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows at a time: the CPU makes the product in float32 first."""
    out = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    step = max(1, _SLICE // packed.shape[1])
    for start in range(0, len(packed), step):
        rows = slice(start, start + step)
        torch.mul(packed[rows], scales[rows, None], out=out[rows])
    return out


def in_order(form: Format, stored: Mapping[str, Tensor]) -> list[Tensor]:
    """What `dequantize` takes of `stored`."""
    return [stored[name] for name in form.tensors()]
