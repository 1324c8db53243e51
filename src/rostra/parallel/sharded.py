"""Fully sharded data parallelism on FSDP2: what the four strategies are, in one table.

strategy        parameters, gradients, states lie     parameters gathered
no_shard        whole on every rank                   never (`replicated.py`)
shard_grad_op   in parts over shard x context         in the forward pass, kept to the backward
hybrid_shard    in parts within, copies across        in the forward and again in the backward
full_shard      in parts over shard x context         in the forward and again in the backward

Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277; ZeRO-2 and ZeRO-3 are shard_grad_op and
full_shard. Gradients are summed, never averaged, after every micro batch, so that they too
never exist whole for longer than a layer; in a pipeline, once, after the last.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from rostra.layout import Layout
from rostra.parallel.held import Held, local, whole_part
from rostra.parallel.mesh import SHARDS, Mesh
from rostra.parallel.stage import AUTOCAST, Stage

REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(stage: Stage, layers: list[nn.Module], mesh: Mesh, layout: Layout) -> None:
    """Shard each of `layers`, and all the rest of the stage together, in place.

    Under mixed precision a layer's weights travel in 16 bits; everything else stays float32,
    so that autocast computes what it computes in one process.
    """
    reduced = REDUCED[layout.reduction]
    inside = MixedPrecisionPolicy(AUTOCAST.get(layout.compute), reduced, cast_forward_inputs=False)
    around = MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False)
    pinned = mesh.device.type != "cpu"
    offload = CPUOffloadPolicy(pinned) if layout.offload_parameters == "cpu" else OffloadPolicy()
    grid = mesh.part(*SHARDS)
    if layout.sharding == "hybrid_shard":
        grid = mesh.grid_of(("replicate",), SHARDS)
    again = layout.sharding != "shard_grad_op"
    for layer in layers:
        fully_shard(
            layer, mesh=grid, reshard_after_forward=again, mp_policy=inside, offload_policy=offload
        )
    for embedding in _frozen_embedding(stage):  # given back at once, before a head is gathered
        fully_shard(embedding, mesh=grid, mp_policy=around, offload_policy=offload)
    fully_shard(
        stage, mesh=grid, reshard_after_forward=False, mp_policy=around, offload_policy=offload
    )
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _frozen_embedding(stage: Stage) -> list[nn.Module]:
    """The input embedding of this stage, where nothing of it trains and no head shares it."""
    embedding, head = stage.model.get_input_embeddings(), stage.model.get_output_embeddings()
    if not stage.first or any(p.requires_grad for p in embedding.parameters()):
        return []
    tied = getattr(head, "weight", None) is embedding.weight  # a first stage's head is nothing
    return [] if tied else [embedding]


def reshard(stages: Iterable[Stage]) -> None:
    """After a forward pass that no backward pass follows: give back what is gathered."""
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


class Sharded:
    """The gradients of sharded parameters: FSDP2 has summed them when the backward pass ends."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], mesh: Mesh) -> None:
        self.parameters = [p for _, p in named]
        self.held = [whole_part(name, p, mesh) for name, p in named]

    @property
    def masters(self) -> list[Held]:
        return []  # the sharded parameters are float32 themselves

    def so_far(self, parameter: nn.Parameter) -> Tensor | None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return local(parameter.grad)

    def before(self, last: bool) -> None:
        pass

    def collect(self) -> None:
        for held, parameter in zip(self.held, self.parameters, strict=True):
            held.value.data = local(parameter)  # FSDP2 may have padded it since
            held.value.grad = None if parameter.grad is None else local(parameter.grad)

    def publish(self) -> None:
        pass

    def clear(self) -> None:
        for held, parameter in zip(self.held, self.parameters, strict=True):
            held.value.grad = parameter.grad = None
