"""What is to be trained, as numbers: the sizes of a model of any family, read off its modules
on the meta device, and how long and in what batches it trains."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from rostra.config import Config
from rostra.errors import RequestError
from rostra.models import decoder_layers
from rostra.models.weights import model_on_meta
from rostra.parallel.pipeline_split import balance, layer_costs

Cut = Literal["columns", "rows", "whole"]
_CUTS: dict[str, Cut] = {"colwise": "columns", "rowwise": "rows"}

# Whole names of embedding and head.
_ENDS = (
    ("model.embed_tokens", "transformer.wte", "gpt_neox.embed_in"),
    ("lm_head", "embed_out"),
)


@dataclass(frozen=True)
class Linear:
    """A matrix of a decoder layer: `inputs` x `outputs`, and how tensor parallelism cuts it."""

    name: str  # within its layer, `self_attn.q_proj`
    inputs: int
    outputs: int
    bias: bool
    cut: Cut

    @property
    def numbers(self) -> int:
        return self.inputs * self.outputs + self.outputs * self.bias


@dataclass(frozen=True)
class Layer:
    """A decoder layer. What is neither matrix nor attention (norms) is `other` numbers."""

    linears: tuple[Linear, ...]
    other: int
    window: int | None  # positions that attention looks back, where it is limited

    @cached_property
    def numbers(self) -> int:
        return sum(linear.numbers for linear in self.linears) + self.other


@dataclass(frozen=True)
class Sizes:
    """A causal model as numbers. `layers` has each kind of layer with how many there are."""

    family: str  # transformers' model type
    layers: tuple[tuple[Layer, int], ...]
    hidden: int
    width: int  # of an embedding: hidden, but in a few families
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool  # input and output embeddings are one
    before: int  # numbers beside the token embedding before the layers (learned positions)
    after: int  # numbers beside the head after the layers (the last norm)
    splits: bool  # whether tensor parallelism knows how to cut it
    order: tuple[int, ...]  # the kind of each layer, as a number in `layers`
    costs: tuple[float, ...]  # operations of each layer, the head's with the last: `layer_costs`

    @cached_property
    def depth(self) -> int:
        return sum(count for _, count in self.layers)

    @cached_property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @cached_property
    def parameters(self) -> int:
        body = sum(layer.numbers * count for layer, count in self.layers)
        return body + self.embedding * (1 if self.tied else 2) + self.before + self.after

    def cuts(self, stages: int) -> list[int]:
        """The stages + 1 borders at which the engine cuts the layers into pipeline stages."""
        return balance(self.costs, stages)


@dataclass(frozen=True)
class Job:
    """One training run without a layout. Batches, length, optimizer, adapter and quantisation
    are those of `config`."""

    config: Config = field(hash=False)
    shape: PretrainedConfig = field(hash=False)
    sizes: Sizes
    tokens: int | None  # of the whole run; None when its data alone tell

    @property
    def length(self) -> int:
        return self.config.data.sequence_length

    @property
    def ends_adapted(self) -> tuple[bool, bool]:
        """Whether LoRA goes around the embedding, and around the head."""
        adapter = self.config.adapter
        lora = adapter.kind == "lora"
        embedding, head = (lora and any(map(adapter.aims_at, names)) for names in _ENDS)
        return embedding, head

    @property
    def global_batch(self) -> int:
        return self.config.train.global_batch_size


def job_of(config: Config, shape: PretrainedConfig) -> Job:
    """The job of a config for a model of `shape`."""
    train, length = config.train, config.data.sequence_length
    tokens = train.tokens
    if train.steps is not None:
        tokens = train.steps * train.global_batch_size * length
    return Job(config, shape, sizes_of(shape), tokens)


def sizes_of(shape: PretrainedConfig) -> Sizes:
    """The sizes of a model of `shape`, from the modules that transformers would build."""
    model, text = model_on_meta(shape), shape.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    source, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = decoder_layers(model)
    found = [_layer(module, i, text, plan) for i, module in enumerate(layers)]
    kinds = Counter(found)
    numbers = {kind: number for number, kind in enumerate(kinds)}
    tied = head is None or head.weight is source.weight
    inside = sum(p.numel() for p in layers.parameters())
    known = source.weight.numel() * (1 if tied else 2)
    around = sum(p.numel() for p in model.parameters()) - inside - known
    positions = sum(
        m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding) and m is not source
    )
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        raise RequestError(
            f"a {text.model_type} has no attention heads: the planner knows models whose layers "
            "are attention and matrices. It trains, but without a plan"
        )
    return Sizes(
        family=text.model_type,
        layers=tuple(kinds.items()),
        hidden=text.hidden_size,
        width=source.weight.shape[1],
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=source.weight.shape[0],
        tied=tied,
        before=positions,
        after=around - positions,
        splits=bool(plan) and set(plan.values()) <= {*_CUTS, "replicated_with_grad_allreduce"},
        order=tuple(numbers[kind] for kind in found),
        costs=tuple(layer_costs(model)),
    )


def _layer(module: nn.Module, index: int, text: PretrainedConfig, plan: dict[str, str]) -> Layer:
    linears = []
    for name, part in module.named_modules():
        if isinstance(part, (nn.Linear, Conv1D)):
            inputs, outputs = part.weight.shape
            if isinstance(part, nn.Linear):
                inputs, outputs = outputs, inputs
            way = plan.get(f"layers.*.{name}", "")
            cut = _CUTS.get(way, "whole")
            linears.append(Linear(name, inputs, outputs, part.bias is not None, cut))
    everything = sum(prod(p.shape) for p in module.parameters())
    other = everything - sum(linear.numbers for linear in linears)
    return Layer(tuple(linears), other, _window(index, text))


def _window(index: int, text: PretrainedConfig) -> int | None:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if window is None or (kinds is not None and kinds[index] != "sliding_attention"):
        return None
    if kinds is None and getattr(text, "use_sliding_window", True) is False:
        return None
    return int(window)
