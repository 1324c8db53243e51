"""Matrix products of the transformer layers in float8, by torchao's dynamic scaling.

A product's operands are scaled by their largest value and rounded to 8 bits, e4m3 forward and
e5m2 for gradients of outputs (Micikevicius et al., 2022, arXiv:2209.05433); weights,
gradients of weights and all else keep their types. Compile the layers too: alone, each cast
passes over memory by itself, and float8 is slower than bfloat16.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rostra.errors import RequestError
from rostra.models import decoder_layers
from rostra.parallel.tensor import COLUMNS, ROWS, ways_to_split

MULTIPLE = 16  # of the sizes that the hardware multiplies
CAPABILITY = (8, 9)  # Ada; Hopper (H100) is 9.0
ROUTERS = ("gate", "router")  # of experts: small, and a rounding sends a token elsewhere


def check_float8(device: torch.device) -> None:
    """Raises RequestError where `device` has no float8 products, or torchao is missing."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise RequestError(
            f"precision.compute = fp8: this device has no float8 matrix products ({name}; an "
            "H100, an L4 or later has); use bf16"
        )
    _library()


def to_float8(model: PreTrainedModel, tensor: int = 1, emulate: bool = False) -> list[str]:
    """Have the linear layers of `model`'s transformer layers multiply in float8, in place.

    The head and the embeddings stay as they are, and so do linear layers with a size that is
    no multiple of 16 (on each of the `tensor` ranks that will split it), routers of experts,
    and experts that are no linear layers. Parameters are the same objects under the same names,
    and may be on the meta device. Returns the names of the layers that changed. `emulate`
    computes with the same roundings on any device, slowly. Call `check_float8` first otherwise.

    Raises RequestError when torchao is missing, or nothing can be changed.
    """
    library = _library()
    inside = {id(m) for layer in decoder_layers(model) for m in layer.modules()}
    ways = ways_to_split(model) if tensor > 1 else {}
    changed: list[str] = []

    def suits(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or id(module) not in inside:
            return False
        way = ways.get(name.removeprefix(f"{model.base_model_prefix}."))
        inputs = MULTIPLE * (tensor if way == ROWS else 1)
        outputs = MULTIPLE * (tensor if way == COLUMNS else 1)
        if module.in_features % inputs or module.out_features % outputs:
            return False
        if name.rpartition(".")[2] in ROUTERS:
            return False
        changed.append(name)
        return True

    # Padded, so that any number of tokens can be multiplied in the gradient of a weight.
    config = library.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    library.convert_to_float8_training(model, module_filter_fn=suits, config=config)
    if not changed:
        raise RequestError(
            f"precision.compute = fp8: no linear layer of this {type(model).__name__} has sizes "
            f"that are multiples of {MULTIPLE} on every tensor rank; use bf16"
        )
    return changed


def _library() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise RequestError(
            f"precision.compute = fp8: cannot import torchao ({error}); "
            'pip install "rostra[lowbit]", or use bf16'
        ) from error
