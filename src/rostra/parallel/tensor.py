"""Tensor parallelism with sequence-parallel norms, on an unchanged model of transformers.

Each rank computes some of the heads of every attention and some of the columns of every MLP
(Shoeybi et al. 2019, arXiv:1909.08053); between these blocks it has a slice of the sequence,
on which norms and residuals work (Korthikanti et al. 2022, arXiv:2205.05198). With n ranks:

    embedding [b, L, h]      looked up in V/n rows, summed (all-reduce), sliced
    every layer [b, L/n, h]  norm → all-gather [b, L, h] → block → reduce-scatter, twice
    leaving the base model   all-gather [b, L, h]
    loss                     over V/n rows of the head: see `chunked_cross_entropy`

The backward pass has the mirror image, and sums the gradients of the norms (all-reduce).
Parameters are DTensors; a module computes with the local part of its own, so attention
kernels and masks meet plain tensors only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from transformers import PretrainedConfig, PreTrainedModel

from rostra.errors import RequestError
from rostra.models import decoder_layers
from rostra.optim.losses import VocabularyShard

# What transformers calls the ways of splitting that are done here.
COLUMNS, ROWS, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"


def check_tensor(config: PretrainedConfig, size: int, length: int) -> None:
    """Raise RequestError when `size` tensor ranks cannot share a model of `config`.

    `length` is the number of positions of one rank's samples: of a sample, or of its part
    where the context is split too.
    """
    if size == 1:
        return
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    asked = f"parallel.tensor = {size}"
    if not plan or not set(plan.values()) <= {COLUMNS, ROWS, WHOLE}:
        raise RequestError(
            f"{asked}: the projections of a {text.model_type} cannot be split into columns and "
            "rows; set parallel.tensor to 1, and parallel.sharding: full_shard to save memory"
        )
    heads = text.num_attention_heads
    shared = {
        "attention heads": heads,
        "key/value heads": getattr(text, "num_key_value_heads", None) or heads,
        "columns of the MLP (intermediate size)": text.intermediate_size,
        "positions of a sample": length,
    }
    if uneven := [f"{n} {what}" for what, n in shared.items() if n % size]:
        works = max(n for n in range(1, size) if gcd(*shared.values()) % n == 0)
        raise RequestError(
            f"{asked}: does not divide {' nor '.join(uneven)}; the largest that works below it "
            f"is {works}"
        )
    if -(-text.vocab_size // size) * (size - 1) >= text.vocab_size:
        raise RequestError(f"{asked}: {text.vocab_size} tokens leave a rank without any; use fewer")


def split_tensors(model: PreTrainedModel, mesh: DeviceMesh, *, last: bool = True) -> None:
    """Split `model` over the 1-D `mesh`, in place; names of parameters stay as they are.

    Every rank brings the same whole model, on the meta device or with its weights; nothing is
    communicated. Parameters become DTensors over `mesh`: projections as the family's plan says,
    embedding and head by rows of the vocabulary, everything else replicated, with gradients
    that are replicated too.

    What enters the decoder layers and what leaves the base model is a plain tensor [batch,
    positions, hidden], whole and the same on all ranks. So are its gradients, but for one:
    with `last`, the gradient of what leaves is each rank's part (as the loss over its rows of
    the vocabulary gives) and is summed here. Without, as on an inner pipeline stage, it comes
    whole. Layers, embedding and norm of other stages may be replaced by modules without
    parameters. Raises RequestError for a model whose parts are not known.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    done: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
    _split_base(model, embedding, mesh, done)
    if embedding is not None and list(embedding.parameters()):
        _distribute(embedding, mesh, COLUMNS, done)
        _look_up_locally(embedding, mesh)
    if head is not None and list(head.parameters()):
        _distribute(head, mesh, COLUMNS, done)
        _compute_locally(head, mesh, COLUMNS)
        head.register_forward_hook(lambda module, _, x: _all_columns(x, module.weight, mesh))
    _slice_between(model, embedding, mesh, last)


def vocabulary_shard(weight: Tensor) -> tuple[Tensor, VocabularyShard | None]:
    """A head's rows on this rank, and which they are; a whole weight as it is, and None.

    For the arguments `weight` (or, alike, `bias`) and `vocabulary` of `chunked_cross_entropy`.
    """
    if not isinstance(weight, DTensor):
        return weight, None
    mesh = weight.device_mesh
    return weight.to_local(), VocabularyShard(_first_row(weight, mesh), mesh.get_group())


def _split_base(
    model: PreTrainedModel,
    embedding: nn.Module | None,
    mesh: DeviceMesh,
    done: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Split the base model but for its embedding, by the plan of its family."""
    base, ways = model.base_model, ways_to_split(model)
    blocks = set()  # attentions and MLPs: what their projections read is gathered once
    for name, module in base.named_modules():
        if not module._parameters or module is embedding:
            continue
        way = ways.get(name)
        if way is None and "norm" not in type(module).__name__.lower():
            raise RequestError(
                f"parallel.tensor: no way is known to split {name} ({type(module).__name__}) of "
                f"a {model.config.get_text_config().model_type}; set parallel.tensor to 1"
            )
        _distribute(module, mesh, way or WHOLE, done)
        _compute_locally(module, mesh, way or WHOLE)
        if way == ROWS:
            blocks.add(name.rpartition(".")[0])
    for name in blocks:
        _on_input(
            base.get_submodule(name),
            lambda x: _move(_narrow(x), mesh, Shard(1), Replicate(), part=True),
        )


def ways_to_split(model: PreTrainedModel) -> dict[str, str]:
    """Of each module of the base model that the plan of its family splits, by name: COLUMNS or
    ROWS, or WHOLE for one that every rank keeps."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    ways = {re.compile(re.escape(n).replace(r"\*", r"\d+")): way for n, way in plan.items()}
    return {
        name: way
        for name, _ in model.base_model.named_modules()
        for pattern, way in ways.items()
        if pattern.fullmatch(name)
    }


def _distribute(
    module: nn.Module, mesh: DeviceMesh, way: str, done: dict[nn.Parameter, nn.Parameter]
) -> None:
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter not in done:
            placement = _placement(way, parameter)
            part = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            done[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module.register_parameter(name, done[parameter])


def _placement(way: str, parameter: Tensor) -> Placement:
    if way == COLUMNS:
        return Shard(0)
    return Shard(1) if way == ROWS and parameter.dim() > 1 else Replicate()


def _compute_locally(module: nn.Module, mesh: DeviceMesh, way: str) -> None:
    """Have `module` compute with its local parameters; rows of a product end as slices."""
    compute = module.forward
    first = mesh.get_local_rank() == 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        local = {name: _local(p) for name, p in module._parameters.items() if p is not None}
        if way == ROWS and "bias" in local:  # added once, not by every rank
            local["bias"] = local["bias"] * float(first)
        result = _with(module, local, compute, *args, **kwargs)
        return _move(result, mesh, Partial(), Shard(1)) if way == ROWS else result

    module.forward = forward


def _with(
    module: nn.Module, values: dict[str, Tensor], compute: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    """`compute(*args)` while `values` stand for the parameters of `module`."""
    held = dict(module._parameters)
    module._parameters.update(values)  # type: ignore[arg-type]
    try:
        return compute(*args, **kw)
    finally:
        module._parameters.update(held)


def _local(parameter: Tensor) -> Tensor:
    """The local part of a parameter. The gradient of a replicated one is summed over ranks,
    each of which sees some of the positions or heads that it was applied to."""
    assert isinstance(parameter, DTensor)
    if not parameter.placements[0].is_replicate():
        return parameter.to_local()
    # a change of nothing, whose backward pass brings a partial gradient to replicated
    same = parameter.redistribute(placements=[Replicate()])
    return same.to_local(grad_placements=[Partial()])


def _look_up_locally(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Have `embedding` look up the tokens whose rows this rank has, and sum over ranks."""
    compute = embedding.forward

    def forward(ids: Tensor) -> Tensor:
        weight, padding = embedding._parameters["weight"], embedding.padding_idx
        assert isinstance(weight, DTensor)
        local = weight.to_local()
        rows = ids - _first_row(weight, mesh)
        here = (rows >= 0) & (rows < local.shape[0])
        embedding.padding_idx = None  # an index of the whole vocabulary
        try:
            found = _with(embedding, {"weight": local}, compute, torch.where(here, rows, 0))
        finally:
            embedding.padding_idx = padding
        found = torch.where(here[..., None], found, 0)
        if padding is not None:  # it gets no gradient
            found = torch.where((ids != padding)[..., None], found, found.detach())
        return _move(found, mesh, Partial(), Replicate())

    embedding.forward = forward


def _first_row(weight: DTensor, mesh: DeviceMesh) -> int:
    """The first row of this rank, when rows are split as by torch.chunk."""
    return -(-weight.shape[0] // mesh.size()) * mesh.get_local_rank()


def _slice_between(
    model: PreTrainedModel, embedding: nn.Module | None, mesh: DeviceMesh, last: bool
) -> None:
    """Slice the sequence before the first layer of this stage, and gather it at the end."""
    layers = decoder_layers(model)
    rest = [m for m in model.base_model.children() if m is not layers and m is not embedding]
    first = next((m for m in [*layers, *rest] if list(m.parameters())), None)
    if first is not None:
        _on_input(first, lambda x: _move(x, mesh, Replicate(), Shard(1)))
    inside: Placement = Replicate() if first is None else Shard(1)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        inner = output.last_hidden_state
        output.last_hidden_state = _move(inner, mesh, inside, Replicate(), part=last)
        return output

    model.base_model.register_forward_hook(leave)


def _on_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the hidden states that `module` is called with."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _move(
    x: Tensor, mesh: DeviceMesh, before: Placement, after: Placement, part: bool = False
) -> Tensor:
    """`x`, of which the ranks have what `before` says, as `after` says.

    From Shard(1) to Replicate is an all-gather of positions, from Partial to Shard(1) a
    reduce-scatter, from Partial to Replicate an all-reduce. The backward pass goes the other
    way; `part` says that each rank's gradient is then a summand, and not the same everywhere.
    """
    moved = DTensor.from_local(x, mesh, [before]).redistribute(placements=[after])
    return moved.to_local(grad_placements=[Partial() if part else after])


def _narrow(x: Tensor) -> Tensor:
    """In autocast's type already, as the projections will have it: half the bytes to send."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _all_columns(logits: Tensor, weight: DTensor, mesh: DeviceMesh) -> Tensor:
    """Logits of the whole vocabulary from each rank's."""
    shape = torch.Size((*logits.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    parts = DTensor.from_local(logits, mesh, [Shard(logits.dim() - 1)], shape=shape, stride=stride)
    return parts.redistribute(placements=[Replicate()]).to_local()
