"""A frozen base in few bits: linear layers that keep their weight quantised.

The weight exists in a float type only while its layer computes, forward or backward; what lies
between the two passes is the quantised one (Dettmers et al. 2023, QLoRA, arXiv:2305.14314).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rostra.adapt.quantized_format import Format, dequantize
from rostra.config.tuning import QuantizationTable
from rostra.errors import RequestError
from rostra.models import decoder_layers
from rostra.models.experts import fused_experts


class QuantizedLinear(nn.Linear):
    """y = x Wᵀ + b with a frozen W in `form`; b, if any, is as it was.

    The stored tensors are parameters of integers (the constant `code` a buffer), which sharding
    cuts and gathers like any others. x and y are as in `nn.Linear`, the product in autocast's
    type where that is on, else in x's. Made on the meta device; see `QuantizedWeights`.
    """

    def __init__(self, form: Format, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which makes a float weight
        self.out_features, self.in_features = form.shape
        self.form = form
        self.register_parameter("bias", bias)
        for name, (shape, dtype) in form.tensors().items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            if name == "code":
                self.register_buffer(name, empty, persistent=False)
            else:
                self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W in float32, computed anew [out, in]; on the meta device an empty tensor."""
        if self.packed.is_meta:
            return torch.empty(self.form.shape, device="meta")
        return dequantize(self.form.kind, self._stored(), torch.float32)

    def _stored(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.form.tensors()]

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if cast else input.dtype
        product: Tensor = _Product.apply(input.to(dtype), self.form.kind, *self._stored())
        return product if self.bias is None else product + self.bias.to(dtype)

    def extra_repr(self) -> str:
        double = ", double" if self.form.four_bits and self.form.double else ""
        return f"{super().extra_repr()}, {self.form.kind}{double}"


class _Product(torch.autograd.Function):
    """x Wᵀ that saves the stored tensors and no float weight; W is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, *stored: Tensor) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(*stored)
        return _multiply(x, kind, stored, transposed=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        stored = ctx.saved_tensors
        return (_multiply(grad, ctx.kind, stored, transposed=False), *[None] * (1 + len(stored)))


def _multiply(x: Tensor, kind: str, stored: tuple[Tensor, ...], transposed: bool) -> Tensor:
    if torch.compiler.is_compiling():
        # One operation: the compiler would see that both passes dequantise the same, and keep
        # the float weight from one to the other.
        return torch.ops.rostra.multiply_dequantized(x, list(stored), kind, transposed)
    return _eagerly(x, list(stored), kind, transposed)


def _eagerly(x: Tensor, stored: list[Tensor], kind: str, transposed: bool) -> Tensor:
    weight = dequantize(kind, stored, x.dtype)
    return functional.linear(x, weight if transposed else weight.t())


_operation = torch.library.custom_op(
    "rostra::multiply_dequantized",
    _eagerly,
    mutates_args=(),
    schema="(Tensor x, Tensor[] stored, str kind, bool transposed) -> Tensor",
)


@_operation.register_fake
def _shape_only(x: Tensor, stored: list[Tensor], kind: str, transposed: bool) -> Tensor:
    rows, columns = stored[0].shape
    columns = columns if kind == "int8" else 2 * columns
    return x.new_empty((*x.shape[:-1], rows if transposed else columns))


def quantize_model(model: PreTrainedModel, section: QuantizationTable) -> None:
    """Put a `QuantizedLinear` in the place of every `nn.Linear` of the decoder layers, but of
    those that `section.skip` names (by their whole name or its last parts). In place, on the
    meta device, before adapters are added and the model is cut; the head stays as it is.

    Raises: RequestError when that is not most of the layers (gpt2's layers are no `nn.Linear`,
    nor are fused experts), when a name in `skip` names none, or a matrix cannot be packed.
    """
    if section.kind == "none":
        return
    if find_spec("bitsandbytes") is None:
        raise RequestError(
            f"quantization.kind = {section.kind}: the package bitsandbytes is not installed; "
            "`pip install rostra[tune]` brings it"
        )
    linear = linear_layers(model)
    skipped = {name for name in linear for skip in section.skip if _named(name, skip)}
    for skip in section.skip:
        if not any(_named(name, skip) for name in linear):
            raise RequestError(
                f"quantization.skip: {skip!r} names no linear module of this model's layers; it "
                f"has {', '.join(sorted({name.rsplit('.', 1)[-1] for name in linear}))}"
            )
    _check_most(model, linear, section.kind)
    for name, module in linear.items():
        if name in skipped:
            continue
        if section.kind != "int8" and module.in_features % 2:
            raise RequestError(
                f"quantization.kind = {section.kind}: two numbers share a byte, and {name} takes "
                f"{module.in_features}; name it in quantization.skip, or use int8"
            )
        shape = (module.out_features, module.in_features)
        double = section.double and section.kind != "int8"
        made = QuantizedLinear(Format(section.kind, double, shape), module.bias)
        made.requires_grad_(False).train(module.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The plain linear modules of the decoder layers, by name; subclasses, which compute
    something else, are none."""
    inside = {id(module) for module in decoder_layers(model).modules()}
    named = model.named_modules()
    return {name: m for name, m in named if type(m) is nn.Linear and id(m) in inside}


def _named(name: str, part: str) -> bool:
    return f".{name}".endswith(f".{part}")


def _check_most(model: PreTrainedModel, linear: dict[str, nn.Linear], kind: str) -> None:
    known = sum(module.weight.numel() for module in linear.values())
    parameters = list(decoder_layers(model).named_parameters())
    if 2 * known < sum(p.numel() for _, p in parameters):
        own = {id(module.weight) for module in linear.values()}
        largest, _ = max((x for x in parameters if id(x[1]) not in own), key=lambda x: x[1].numel())
        raise RequestError(
            f"quantization.kind = {kind}: most weights of a {model.config.model_type}'s layers "
            f"(such as {largest}) are not those of linear modules, which alone are quantised; set "
            "quantization: none"
        )


def freeze_base(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep frozen weights that are only ever multiplied in `dtype`, in place, on the meta
    device: those of linear modules and fused experts, and of plain embeddings, whose output is
    float32 as before.

    Under autocast to `dtype` the result is the same to the bit for weights that are exact in
    it: autocast casts them before each product anyhow. Norms stay float32, and so do embeddings
    that compute (Gemma's scale theirs). A weight that is tied stays tied.
    """
    if dtype == torch.float32:
        return
    made: dict[int, nn.Parameter] = {}
    modules = list(model.modules())
    embeddings = [m for m in modules if isinstance(m, nn.Embedding)]
    computing = {id(m.weight) for m in embeddings if type(m) is not nn.Embedding}
    multiplied = [
        (m, "weight") for m in modules if isinstance(m, (nn.Linear, Conv1D, nn.Embedding))
    ]
    multiplied += [(m, name) for m in fused_experts(model) for name in m._parameters]
    for module, name in multiplied:
        weight = module._parameters.get(name)  # a quantised layer has none
        if weight is None or weight.requires_grad or id(weight) in computing:
            continue
        if id(weight) not in made:
            frozen = torch.empty_like(weight, dtype=dtype)
            made[id(weight)] = nn.Parameter(frozen, requires_grad=False)
        setattr(module, name, made[id(weight)])
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_as_float32)


def _as_float32(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output.float()
