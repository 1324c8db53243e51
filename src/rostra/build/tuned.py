"""A frozen base with adapters: its structure on the meta device, and where its weights are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rostra.adapt import AdaptedWeights, Adapter, adapter_weights, add_adapter
from rostra.adapt.quantized import QuantizedLinear, quantize_model
from rostra.adapt.quantized_weights import DequantizedWeights, QuantizedWeights, cached_weights
from rostra.config import Config
from rostra.data.cache import cache_folder
from rostra.models import parameter_counts
from rostra.pieces import Reader


@dataclass(frozen=True)
class Built:
    """A model and where its weights come from: on the CPU with them already (None), or on the
    meta device, to be filled in by a reader."""

    model: PreTrainedModel
    weights: Reader | None = None
    adapter: Adapter | None = None

    @property
    def counts(self) -> dict[str, int]:
        """`parameters` and `trainable_parameters`; of a quantised weight, its numbers."""
        counts = parameter_counts(self.model)
        counts["parameters"] += sum(
            module.in_features * module.out_features - _stored(module)
            for module in self.model.modules()
            if isinstance(module, QuantizedLinear)
        )
        return counts


def _stored(module: nn.Module) -> int:
    named = module.named_parameters(recurse=False)
    return sum(parameter.numel() for name, parameter in named if name != "bias")


def tune(
    model: PreTrainedModel,
    base: Reader,
    config: Config,
    *,
    identity: Mapping[str, Any] | None = None,
    prompt: Sequence[int] = (),
    grown: tuple[str, ...] = (),
) -> Built:
    """Quantise and adapt `model`, which is on the meta device and whole, in place.

    `base` has its weights in a float type. Quantised ones are kept on disk under `data.cache`
    for the next start when the base has an `identity`. `prompt` are the tokens that a learned
    prompt begins as; `grown` the modules that train whole because tokens were added.
    """
    stored = plain = base
    if config.quantization.kind != "none":
        quantize_model(model, config.quantization)
        stored = quantized = QuantizedWeights(base, model)
        if identity is not None and config.quantization.cache:
            stored = cached_weights(quantized, identity, cache_folder(config.data))
        plain = DequantizedWeights(stored, model)  # what an adapter really begins beside
    adapter = add_adapter(model, config.adapter, grown)
    assert adapter is not None
    first = adapter_weights(model, adapter, config.run.seed, plain, prompt)
    return Built(model, AdaptedWeights(model, stored, first), adapter)
