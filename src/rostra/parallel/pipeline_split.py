"""A model cut into pipeline stages: where to cut, and what remains of it in a stage.

A stage is the whole model's own class with modules taken out, so that everything that finds
its way by the model's structure (tensor plans, decoder layers, names of parameters) still does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rostra.errors import RequestError
from rostra.models import bare_layer, create_model, decoder_layers
from rostra.models.experts import experts_of
from rostra.models.tiny import tiny_config


class PassThrough(nn.Module):
    """In the place of a module that is on another stage: gives back its first argument.

    Keeps the plain attributes of what it replaces, which transformers' models read off their
    layers (`attention_type`, say). `tied` says that the module's weight was one with the
    model's other embedding, and `weight_name` what it was called, within an adapter or not.
    """

    def __init__(self, replaced: nn.Module, tied: bool = False) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if not name.startswith("_") and name not in ("training", "forward"):
                setattr(self, name, value)
        self.tied = tied
        adapted = bare_layer(replaced) is not replaced
        self.weight_name = "base_layer.weight" if adapted else "weight"

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


class NoEmbedding(nn.Module):
    """In the place of an embedding that the first stage has added already."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), device=ids.device)  # no dimension: changes no sum's type


def split_layers(model: PreTrainedModel, stage: int, stages: int, cuts: Sequence[int]) -> None:
    """Make a causal model (also on the meta device) into stage `stage` of `stages`, in place.

    `cuts` are the stages + 1 borders from `balance`: the stage keeps decoder layers cuts[stage]
    to cuts[stage + 1] - 1 under their names of the whole model; the others pass their input
    on. The embedding stays on the first stage alone: later ones are called with
    `inputs_embeds=`, the [batch, positions, hidden] that the stage before returned. The final
    norm and the head stay on the last alone. `check_stages` tells whether the family can be cut.
    """
    first, last = stage == 0, stage == stages - 1
    source, head, layers = model.get_input_embeddings(), _head(model), decoder_layers(model)
    tied = head is not None and getattr(source, "weight", None) is head.weight
    before, after = _around(model, layers)
    if not first:
        for module in before:
            extra = isinstance(module, nn.Embedding) and module is not source
            _replace(model, module, NoEmbedding() if extra else PassThrough(module, tied))
    if not last:
        for module in after if head is None else (*after, head):
            _replace(model, module, PassThrough(module, tied))
    for index, layer in enumerate(layers):
        if not cuts[stage] <= index < cuts[stage + 1]:
            layers[index] = PassThrough(layer)


def _head(model: PreTrainedModel) -> Any:
    """The head, or the adapter around it; None for what is no linear layer."""
    head = model.get_output_embeddings()
    return head if isinstance(bare_layer(head), nn.Linear) else None


def _around(
    model: PreTrainedModel, layers: nn.ModuleList
) -> tuple[list[nn.Module], list[nn.Module]]:
    """What works before the layers and after them: in the order of the module that has them.

    Modules that only compute (rotary embeddings) are needed by the layers of every stage.
    """
    children = next(
        list(m.children()) for m in model.modules() if any(c is layers for c in m.children())
    )
    at = next(i for i, child in enumerate(children) if child is layers)
    works = [
        i
        for i, child in enumerate(children)
        if isinstance(child, nn.Dropout) or next(child.parameters(), None) is not None
    ]
    return [children[i] for i in works if i < at], [children[i] for i in works if i > at]


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def own_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers that are on this stage; all of them where nothing was cut."""
    return [layer for layer in decoder_layers(model) if not isinstance(layer, PassThrough)]


def tied_weight(model: PreTrainedModel) -> nn.Parameter | None:
    """This stage's copy of an embedding that is tied to the head; None where there is none.

    The first stage has it as its embedding, the last as its head. None, too, for a stage
    that has both, where they are one parameter.
    """
    source, head = model.get_input_embeddings(), model.get_output_embeddings()
    for absent, present in ((head, source), (source, head)):
        if isinstance(absent, PassThrough) and absent.tied and hasattr(present, "weight"):
            return present.weight
    return None


def tied_aliases(model: PreTrainedModel) -> dict[str, str]:
    """On the last stage of a tied model: the name of its head's weight, to the owner's name.

    The owner is the first stage's embedding: checkpoints hold the weight under that name,
    written by the first stage alone; the last stage reads it from there, and leaves it out of
    norms over the whole model. Empty on other stages, and where both are on one.
    """
    source, weight = model.get_input_embeddings(), tied_weight(model)
    if weight is None or not isinstance(source, PassThrough):
        return {}
    owner = next(name for name, module in model.named_modules() if module is source)
    here = next(name for name, parameter in model.named_parameters() if parameter is weight)
    return {here: f"{owner}.{source.weight_name}"}


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """The stages + 1 borders [0, ..., len(costs)] at which the dearest stage is cheapest.

    Exact, by dynamic programming; of cuts that are equal in this, the most even one (the least
    sum of squares). Every stage has at least one layer. Raises RequestError when there are
    more stages than layers.
    """
    if stages > len(costs):
        raise RequestError(
            f"parallel.pipeline: {stages} stages (parallel.pipeline x parallel.stages) for "
            f"{len(costs)} layers; at most {len(costs)} work"
        )
    highest = _partition(costs, stages, float("inf"), squared=False)[0]
    return _partition(costs, stages, highest, squared=True)[1]


def _partition(
    costs: Sequence[float], stages: int, limit: float, squared: bool
) -> tuple[float, list[int]]:
    """The least largest cost of a stage (or sum of squares), and its borders, for stages that
    cost no more than `limit`."""
    sums, count = [0.0, *accumulate(costs)], len(costs)
    best: list[tuple[float, list[int]] | None] = [(0.0, [0]), *[None] * count]
    for _ in range(stages):
        following: list[tuple[float, list[int]] | None] = [None] * (count + 1)
        for end in range(1, count + 1):
            for start in range(end):
                before, cost = best[start], sums[end] - sums[start]
                if before is None or cost > limit:
                    continue
                value = before[0] + cost * cost if squared else max(before[0], cost)
                found = following[end]
                if found is None or value < found[0]:
                    following[end] = (value, [*before[1], end])
        best = following
    result = best[count]
    assert result is not None  # as many layers as stages, at least
    return result


def layer_costs(model: PreTrainedModel) -> list[float]:
    """Operations of each decoder layer per token, for `balance`; the model may be on meta.

    6 for each parameter that a token meets (Kaplan et al. 2020, arXiv:2001.08361): of experts
    those it is sent to. The head is added to the last layer; an embedding is a look-up.
    """
    experts, active = experts_of(model.config)
    part = active / experts if experts else 1.0

    def operations(layer: nn.Module) -> float:
        named = [(n, p.numel()) for n, p in layer.named_parameters() if p.is_floating_point()]
        # a quantised layer has a weight too, that is not among its parameters
        named += [
            (n, m.in_features * m.out_features)
            for n, m in layer.named_modules()
            if isinstance(m, nn.Linear) and "weight" not in m._parameters
        ]
        return 6 * sum(size * (part if ".experts." in f".{n}" else 1.0) for n, size in named)

    costs = [operations(layer) for layer in decoder_layers(model)]
    head = _head(model)
    costs[-1] += 6 * head.weight.numel() if head is not None else 0
    return costs


@torch.no_grad()
def check_stages(config: PretrainedConfig) -> None:
    """Raise RequestError unless two stages of a tiny model of this family compute what the
    whole model does. Tried rather than looked up, so that nothing a family does is missed."""
    refusal = RequestError(
        f"parallel.pipeline: a {config.model_type} model cannot be cut into stages: what its "
        "parts compute is not what the whole does; set parallel.pipeline to 1 (and, for a model "
        "that needs several ranks, parallel.sharding to full_shard)"
    )
    try:
        with torch.device("cpu"):  # the model itself may be on its way to the meta device
            expected, found = _whole_and_parts(tiny_config(config))
    except Exception as error:  # whatever a model of an unknown family may raise
        raise refusal from error
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
        raise refusal


def _whole_and_parts(config: PretrainedConfig) -> tuple[Tensor, Tensor]:
    """What a model computes, and what its two halves do, for a sample of two documents."""
    whole = create_model(config, seed=0, attention="eager").eval()
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    count = len(decoder_layers(whole))
    for stage, part in enumerate((first, second)):
        split_layers(part, stage, 2, [0, count // 2, count])
    tokens = torch.arange(1, 13)[None]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    between = _hidden(first, positions, input_ids=tokens)
    expected = _hidden(whole, positions, input_ids=tokens)
    return expected, _hidden(second, positions, inputs_embeds=between)


def _hidden(model: PreTrainedModel, positions: Tensor, **inputs: Tensor) -> Tensor:
    output = model.base_model(position_ids=positions, use_cache=False, **inputs)
    return output.last_hidden_state
