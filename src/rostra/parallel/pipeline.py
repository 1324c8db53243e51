"""Pipeline parallelism: the micro batches of a step through stages that lie on several ranks.

schedule           backward pass of a micro batch          stages a rank  source
gpipe              after all forward passes                1              arXiv:1811.06965
1f1b               as soon as it can be                    1              arXiv:1806.03377
interleaved_1f1b   as soon as it can be                    2 or more      arXiv:2104.04473
zero_bubble        split: inputs at once, weights in what  1 or more      arXiv:2401.10241
                   would be idle time

The schedules are those of torch.distributed.pipelining. Of P ranks, rank r has the stages r,
r + P, r + 2P, ... Losses are sums, so gradients are sums over the micro batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from rostra.batch import Batch
from rostra.errors import RequestError
from rostra.layout import Layout
from rostra.parallel.mesh import Mesh
from rostra.parallel.pipeline_split import tied_weight
from rostra.parallel.sharded import reshard
from rostra.parallel.stage import Stage

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def check_pipeline(layout: Layout, layers: int) -> None:
    """Refuse, before anything is built, what the schedule cannot run.

    `layers` is the number of the model's decoder layers. Raises RequestError for more stages
    than layers, and a number of micro batches the schedule cannot take (with the nearest that
    it can).
    """
    ranks, stages = layout.pipeline, layout.pipeline * layout.stages
    if ranks == 1:
        return
    if stages > layers:
        raise RequestError(
            f"parallel.pipeline = {ranks}: with {layout.stages} stages on each rank these are "
            f"{stages} stages for {layers} layers; the largest that works is "
            f"parallel.pipeline: {layers // layout.stages or layers}"
            + ("" if layers >= layout.stages else " with parallel.stages: 1")
        )
    given = layout.accumulation
    if takes(layout, given):
        return
    nearest = min(
        (n for n in range(1, given + ranks + 1) if takes(layout, n)), key=lambda n: abs(n - given)
    )
    raise RequestError(
        f"parallel.schedule = {layout.pipeline_schedule}: a rank has {given} micro batches in a "
        f"step, which {ranks} pipeline ranks cannot take; the nearest that works is {nearest}. "
        "Set train.micro_batch_size or train.global_batch_size (micro batches = global batch / "
        "data ranks / micro batch), or parallel.schedule: gpipe, which takes any"
    )


def takes(layout: Layout, micro_batches: int) -> bool:
    """Whether the layout's schedule runs so many micro batches."""
    if layout.pipeline_schedule == "1f1b":
        return micro_batches >= layout.pipeline
    if layout.pipeline_schedule in SEVERAL:
        return micro_batches % max(1, micro_batches // layout.pipeline) == 0
    return True


class Pipeline:
    """Runs the micro batches of a rank through its stages, with the other ranks of its pipeline.

    `stages` are this rank's, in their order along the model. All ranks of a pipeline are
    called with the same micro batches. A call holds a whole step; after it, gradients are where
    `so_far` (of `Gradients`) finds them, those of tied embeddings summed over both copies.
    zero_bubble leaves those of projections in `.grad`, as its part of the backward pass for
    weights runs no hooks of theirs. FSDP reduces once, at the end of the call; under
    zero_bubble, parameters stay gathered from the forward to the backward pass.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        mesh: Mesh,
        so_far: Callable[[nn.Parameter], Tensor | None],
    ) -> None:
        self.so_far = so_far
        self.stages, self.mesh, self.layout = list(stages), mesh, mesh.layout
        group = mesh.group("pipeline")
        assert group is not None  # more than one rank
        self.group = group
        self.rank, self.ranks = mesh.coordinate("pipeline"), self.layout.pipeline
        # The residual stream stays float32 under autocast; so do its gradients on the way back.
        self.dtype = torch.bfloat16 if self.layout.compute == "bf16_pure" else torch.float32
        self._made: tuple[int, torch.Size, Any] | None = None
        for stage in self.stages:
            if not stage.last:
                stage.register_forward_hook(self._as_sent)
            if self.layout.splits_backward and isinstance(stage, FSDPModule):
                # A split backward pass finds its weights by the parameters that are in place
                # when it begins: sharded ones would be missed, and their gradients lost.
                stage.set_reshard_after_forward(False)

    def __call__(self, parts: Sequence[Batch], backward: bool) -> None:
        """Forward, and where asked backward, through all stages; `parts` have one shape where
        backward. The last stage keeps the loss's sum (`Stage.total`)."""
        if not backward:
            self._forward(parts)
            return
        names = parts[0].tensors()
        whole = {name: torch.cat([part.tensors()[name] for part in parts]) for name in names}
        schedule = self._schedule(len(parts), parts[0].input_ids.shape)
        schedule.step(**whole, target=whole["labels"], return_outputs=False)
        sum_tied_gradients(self.stages, self.group, self.mesh.device, self.so_far)

    def _schedule(self, count: int, shape: torch.Size) -> Any:
        """The schedule for `count` micro batches of `shape`, kept from step to step: it has the
        buffers that hidden states and their gradients are received into."""
        if self._made is None or self._made[:2] != (count, shape):
            self._made = None  # its buffers go before new ones come
            stages: list[Any] = [self._stage(index, shape) for index in range(len(self.stages))]
            self._made = (count, shape, _schedule(self.layout, stages, count))
        return self._made[2]

    def _stage(self, index: int, shape: torch.Size) -> PipelineStage:
        """Shapes and types are told, not inferred: inference would run a micro batch more."""
        stage = self.stages[index]
        hidden = torch.empty(
            self._hidden(shape), dtype=self.dtype, device="meta", requires_grad=True
        )
        loss = torch.empty((), device="meta", requires_grad=True)
        return PipelineStage(
            stage,
            self._place(index),
            self.ranks * len(self.stages),
            self.mesh.device,
            input_args=() if stage.first else (hidden,),
            output_args=(loss if stage.last else hidden,),
            group=self.group,
        )

    def _place(self, index: int) -> int:
        """Where in the pipeline the rank's stage `index` is."""
        return index * self.ranks + self.rank

    def _hidden(self, shape: torch.Size) -> tuple[int, int, int]:
        """The shape of the hidden states of a micro batch: under context parallelism, of this
        rank's positions."""
        size = self.stages[0].model.config.get_text_config().hidden_size
        return shape[0], shape[1] // self.layout.context, size

    def _as_sent(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Receivers know one type, and take what lies in one piece."""
        return output.to(self.dtype).contiguous()

    @torch.no_grad()
    def _forward(self, parts: Sequence[Batch]) -> None:
        """Each micro batch through all stages of the rank: whatever their number and shapes."""
        ahead, behind = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        for part in parts:
            for stage in self.stages:
                hidden = []
                if not stage.first:
                    shape = self._hidden(part.input_ids.shape)
                    hidden = [torch.empty(shape, dtype=self.dtype, device=self.mesh.device)]
                    dist.recv(hidden[0], group=self.group, group_src=behind)
                output = stage(*hidden, **part.tensors())
                if not stage.last:
                    dist.send(output, group=self.group, group_dst=ahead)
        reshard(self.stages)


def _schedule(layout: Layout, stages: Sequence[PipelineStage], micro_batches: int) -> Any:
    # Stages return their loss: the schedule's loss function only passes it on.
    options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
    name = layout.pipeline_schedule
    if name in SINGLE:
        return SINGLE[name](stages[0], micro_batches, **options)
    return SEVERAL[name](list(stages), micro_batches, **options)


def actions(layout: Layout, rank: int) -> list[tuple[str, int]]:
    """What rank `rank` of a pipeline does in a step, in this order: F, B (or I for inputs and W
    for weights), with several stages also exchanges, as torch.distributed.pipelining names them;
    and for which of its stages. In the process group of a pipeline's ranks, which may be fake."""
    count = layout.pipeline * layout.stages
    example = torch.empty((), device="meta")
    stages = [
        PipelineStage(
            nn.Identity(), place, count, torch.device("cpu"),
            input_args=(example,), output_args=(example,),
        )
        for place in range(rank, count, layout.pipeline)
    ]  # fmt: skip
    schedule = _schedule(layout, stages, layout.accumulation)
    several = layout.pipeline_schedule in SEVERAL
    order = schedule.pipeline_order_with_comms if several else schedule.pipeline_order
    found = [x for x in order[rank] if x is not None and (several or x.is_compute_op)]
    return [(x.computation_type.value, x.stage_index // layout.pipeline) for x in found]


def sum_tied_gradients(
    stages: Sequence[Stage],
    group: dist.ProcessGroup,
    device: torch.device,
    so_far: Callable[[nn.Parameter], Tensor | None],
) -> None:
    """Add the gradients of the two copies of a tied embedding, in place, on both their ranks.

    The first stage's embedding and the last stage's head are copies of one parameter, whose
    gradient is the sum of theirs; with equal gradients and equal states they stay equal. The
    first stage's is the one that checkpoints name (`pipeline_split.tied_aliases`). The copies
    are on the first and the last rank of the pipeline `group` and laid out alike, so that the
    local parts of sharded ones, which `so_far` gives, match; other ranks have nothing to do.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    for stage in stages:
        weight = tied_weight(stage.model)
        if weight is None or not weight.requires_grad:
            continue
        gradient = so_far(weight)
        assert gradient is not None  # every backward pass reaches both copies
        peer, own = last if rank == 0 else 0, gradient.to(device).contiguous()
        other = torch.empty_like(own)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()
        gradient += other.to(gradient.device)
