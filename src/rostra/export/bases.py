"""The base of a merge: as it is on disk, or as the adapter saw it in few bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rostra.adapt.quantized import quantize_model
from rostra.adapt.quantized_weights import DequantizedWeights, QuantizedWeights
from rostra.config.tuning import QuantizationTable
from rostra.errors import RequestError
from rostra.models import FolderWeights, model_on_meta, pretrained_on_meta, pretrained_reader
from rostra.pieces import Reader, Tensors

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Base:
    """`weights` are what adapters are merged into. `quantized` says whether these are the
    dequantised ones; `other` are then those on disk, and the other way round, or None where
    there is one kind only.
    """

    config: PretrainedConfig
    stored: Reader  # in the types on disk
    weights: Reader
    quantized: bool = False
    other: Reader | None = None

    def dtype(self, name: str) -> torch.dtype:
        return self.stored.read(name, (0,), (1,)).dtype


def open_base(
    path: str, quantization: QuantizationTable | None, dequantize: bool, notice: Notice
) -> Base:
    """The base in `path`, a folder or hub id; `quantization` is what the adapter was trained on.

    With `dequantize`, its weights are quantised as in training and dequantised again.

    Raises: RequestError when there is none, or it is quantised in a way that cannot be undone.
    """
    pretrained_on_meta(path)  # which refuses what is no model
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    dtype = _dtype(config)
    if getattr(config, "quantization_config", None) is not None:
        return _dequantized_folder(path, config, notice)
    stored = pretrained_reader(path, config, notice)
    if not isinstance(stored, FolderWeights):  # loaded in float32, whatever its type is
        stored = _As(stored, dtype)
    if quantization is None or quantization.kind == "none":
        return Base(config, stored, stored)
    shape = model_on_meta(config)
    quantize_model(shape, quantization)
    seen = DequantizedWeights(QuantizedWeights(stored, shape), shape)
    kind = quantization.kind
    if dequantize:
        notice(
            f"merging into the base as the adapter saw it, in {kind} and dequantised; "
            "--no-dequantize merges into the weights on disk"
        )
        return Base(config, stored, seen, quantized=True, other=stored)
    notice(f"merging into the weights on disk, though the adapter was trained on them in {kind}")
    return Base(config, stored, stored, other=seen)


def _dequantized_folder(path: str, config: PretrainedConfig, notice: Notice) -> Base:
    """A base whose files are quantised: it can be merged into dequantised only."""
    known = config.quantization_config
    method = str((known if isinstance(known, dict) else vars(known)).get("quant_method", "?"))
    if not method.endswith("bitsandbytes"):
        raise RequestError(
            f"{path}: its weights are quantised by {method}, and only those of bitsandbytes can "
            "be dequantised; give the model in 16 bit with --base"
        )
    notice(f"{path}: its weights are quantised; merging into them dequantised, all at once")
    model = AutoModelForCausalLM.from_pretrained(
        path, use_safetensors=True, trust_remote_code=False, device_map="cpu"
    ).dequantize()
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    named = (*model.named_parameters(), *model.named_buffers())
    stored = Tensors({name: value.to(_dtype(config)) for name, value in named})
    return Base(config, stored, stored, quantized=True)


def _dtype(config: PretrainedConfig) -> torch.dtype:
    dtype: torch.dtype | None = getattr(config, "dtype", None)
    return dtype or torch.float32


class _As:
    """`reader`, with what is a float in `dtype`."""

    def __init__(self, reader: Reader, dtype: torch.dtype) -> None:
        self._reader, self._dtype = reader, dtype

    def names(self) -> Iterable[str]:
        return self._reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name)

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        part = self._reader.read(name, offset, size)
        return part.to(self._dtype) if part.is_floating_point() else part
