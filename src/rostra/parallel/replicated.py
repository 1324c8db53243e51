"""Data parallelism with the whole model on every rank: no_shard, and ZeRO-1.

Gradients lie in flat buckets. A bucket is summed over the ranks as soon as the backward pass of
the last micro batch has filled it, while the pass goes on (Li et al. 2020, PyTorch Distributed,
arXiv:2006.15704, section 3.2). Under ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054) a rank
gets the sums of its own stretch of each bucket, updates the weights there, and gathers the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rostra.parallel.held import Held, first_of_copies, local, parts_of
from rostra.parallel.mesh import SHARDS, SUMMED, Mesh
from rostra.pieces import local_piece

Named = list[tuple[str, nn.Parameter]]
BUCKET_BYTES = 25 * 2**20  # as DDP's: enough to fill a link, small enough to begin early


@dataclass
class Bucket:
    """Parameters whose gradients travel together; all tensors are flat and of one length."""

    parameters: Named
    starts: list[int]  # of each parameter
    gradients: Tensor  # float32
    weights: Tensor | None = None  # the parameters themselves, under ZeRO-1
    filled: set[int] = field(default_factory=set)  # whose gradients of the step are complete
    wire: Tensor | None = None  # what is under way
    work: Any = None


class Buckets:
    """The gradients of `named`, summed over the data and context ranks.

    `sharded` is ZeRO-1. When parameters are `kept` in 16 bits, the optimizer updates float32
    masters, of the rank's own stretches.
    """

    def __init__(
        self,
        named: Named,
        mesh: Mesh,
        sharded: bool,
        reduction: torch.dtype = torch.float32,
        kept: torch.dtype | None = None,
    ) -> None:
        self.mesh, self.reduction = mesh, reduction
        self.sharded = sharded and mesh.size(*SHARDS) > 1
        self.parts = mesh.size(*SHARDS) if self.sharded else 1
        self._last = False
        self._under_way: list[Bucket] = []
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []  # of what is held
        self._masters: list[tuple[Held, Tensor]] = []  # and the weights that they round to
        self.buckets: list[Bucket] = []
        self.held: list[Held] = []
        for number, group in enumerate(_grouped(reversed(named))):
            exact = [local(p).reshape(-1) for _, p in group]
            bucket = self._bucket(group, exact[0].dtype if kept is None else kept)
            self.buckets.append(bucket)
            self.held += self._hold(bucket, exact)
            for index, (_, parameter) in enumerate(group):
                parameter.register_post_accumulate_grad_hook(self._mover(number, index))
        order = {name: index for index, (name, _) in enumerate(named)}
        self.held.sort(key=lambda held: order[held.name])
        self._arm()

    def _bucket(self, named: Named, kept: torch.dtype) -> Bucket:
        """Room for the gradients; the parameters move to `kept`, and together under ZeRO-1."""
        owns = [local(p) for _, p in named]
        starts = [sum(x.numel() for x in owns[:index]) for index in range(len(owns))]
        length = -(-sum(x.numel() for x in owns) // self.parts) * self.parts
        bucket = Bucket(named, starts, torch.zeros(length, device=owns[0].device))
        if self.sharded:
            bucket.weights = torch.zeros(length, dtype=kept, device=owns[0].device)
        for (_, parameter), own, start in zip(named, owns, starts, strict=True):
            if bucket.weights is not None:
                view = bucket.weights[start : start + own.numel()].view(own.shape)
                parameter.data = view.copy_(own)
            elif own.dtype != kept:
                parameter.data = parameter.detach().to(kept)
        return bucket

    def _hold(self, bucket: Bucket, exact: list[Tensor]) -> Iterable[Held]:
        """What this rank updates: its stretch of the bucket, parameter by parameter."""
        mesh, length = self.mesh, len(bucket.gradients) // self.parts
        begin = mesh.coordinate(*SHARDS) * length if self.sharded else 0
        for (name, parameter), start, full in zip(
            bucket.parameters, bucket.starts, exact, strict=True
        ):
            own = local(parameter)
            low, high = max(begin - start, 0), min(begin + length - start, own.numel())
            if low >= high:
                continue
            piece = local_piece(parameter)
            weights, gradients = (
                own.view(-1)[low:high],
                bucket.gradients[start + low :][: high - low],
            )
            offset: tuple[int, ...] = (low,)
            written = mesh.coordinate("replicate", "tensor") == 0
            if not self.sharded:
                weights, gradients = own, gradients.view(own.shape)
                offset, written = piece.offset, first_of_copies(parameter, mesh)
            rounded = weights.dtype != torch.float32
            master = full[low:high].float().view(weights.shape) if rounded else weights
            parts = parts_of(parameter) * self.parts
            copies = mesh.layout.world_size // mesh.layout.pipeline // parts
            value = nn.Parameter(master.clone() if rounded and self.sharded else master)
            held = Held(name, value, piece.shape, offset, copies, written, parts=parts)
            self._gradients.append((value, gradients))
            if rounded:
                self._masters.append((held, weights))
            yield held

    def _arm(self) -> None:
        for bucket in self.buckets:
            bucket.filled.clear()
        self.next = 0

    def _mover(self, number: int, index: int) -> Callable[[Tensor], None]:
        """Move a gradient into its bucket as soon as it exists; no 16-bit one outlives it.

        The hook knows `self` weakly: a parameter that held what holds it would never be freed.
        """
        buckets = weakref.ref(self)

        def move(parameter: Tensor) -> None:
            if (own := buckets()) is not None:
                own._move(own.buckets[number], index, parameter)

        return move

    def _move(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        gradient = local(parameter.grad).reshape(-1)
        start = bucket.starts[index]
        bucket.gradients[start : start + gradient.numel()].add_(gradient)
        parameter.grad = None
        if self._last:
            bucket.filled.add(index)
            self._send(finished=False)

    def _move_rest(self) -> None:
        """Gradients that came without a hook: zero-bubble schedules set them themselves."""
        for bucket in self.buckets:
            for index, (_, parameter) in enumerate(bucket.parameters):
                self._move(bucket, index, parameter)

    def so_far(self, parameter: nn.Parameter) -> Tensor | None:
        self._move_rest()
        for bucket in self.buckets:
            for (_, each), start in zip(bucket.parameters, bucket.starts, strict=True):
                if each is parameter:
                    own = local(parameter)
                    return bucket.gradients[start : start + own.numel()].view(own.shape)
        return None

    def before(self, last: bool) -> None:
        self._last = last

    def _send(self, finished: bool) -> None:
        """Sum the buckets that are full; in one order, which is the same on every rank."""
        while self.next < len(self.buckets):
            bucket = self.buckets[self.next]
            if len(bucket.filled) < len(bucket.parameters) and not finished:
                return
            self._sum(bucket)
            self.next += 1

    def _sum(self, bucket: Bucket) -> None:
        """Begin to sum a bucket over the ranks. Two are under way at most, so that the exchange
        takes no more room than that."""
        group = self.mesh.group(*(SHARDS if self.sharded else SUMMED))
        if group is None:
            return
        while len(self._under_way) > 1:
            self._finish(self._under_way.pop(0))
        wire = bucket.gradients.to(self.reduction)
        if not self.sharded:
            bucket.work = dist.all_reduce(wire, group=group, async_op=True)
        elif self._exchanges:
            parts, wire = wire, torch.empty_like(wire)
            bucket.work = dist.all_to_all_single(wire, parts, group=group, async_op=True)
        else:
            own = self._own(wire)
            bucket.work = dist.reduce_scatter_tensor(own, wire, group=group, async_op=True)
        bucket.wire = wire
        self._under_way.append(bucket)

    def _finish(self, bucket: Bucket) -> None:
        """Wait for a bucket: its sums are in float32 where they belong."""
        bucket.work.wait()
        assert bucket.wire is not None
        own = self._own(bucket.gradients)
        if self.sharded and self._exchanges:
            torch.sum(bucket.wire.view(self.parts, -1), 0, dtype=own.dtype, out=own)
        elif bucket.wire is not bucket.gradients:
            own.copy_(self._own(bucket.wire))
        bucket.wire = bucket.work = None

    @property
    def _exchanges(self) -> bool:
        """gloo's reduce-scatter is an all-reduce and a copy; an all-to-all, whose parts each
        rank sums itself, sends half of that."""
        return self.mesh.device.type == "cpu"

    def _own(self, flat: Tensor) -> Tensor:
        """This rank's stretch."""
        return flat.chunk(self.parts)[self.mesh.coordinate(*SHARDS) if self.sharded else 0]

    def collect(self) -> None:
        self._move_rest()
        self._send(finished=True)
        replicas = self.mesh.group("replicate") if self.sharded else None
        while self._under_way:
            self._finish(self._under_way.pop(0))
        for bucket in self.buckets if replicas is not None else ():
            dist.all_reduce(self._own(bucket.gradients), group=replicas)
        for value, gradient in self._gradients:
            value.grad = gradient
        self._arm()

    @torch.no_grad()
    def publish(self) -> None:
        for held, weights in self._masters:
            weights.copy_(held.value)
        if not self.sharded:
            return
        group = self.mesh.group(*SHARDS)
        works = []
        for bucket in self.buckets:
            assert bucket.weights is not None
            own = self._own(bucket.weights)
            works.append(
                dist.all_gather_into_tensor(bucket.weights, own, group=group, async_op=True)
            )
        for work in works:
            work.wait()

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.gradients.zero_()

    @property
    def masters(self) -> list[Held]:
        return [held for held, _ in self._masters]


def _grouped(named: Iterable[tuple[str, nn.Parameter]]) -> Iterable[Named]:
    """Runs of parameters of one type, of about the size of a bucket."""
    group: Named = []
    size = 0
    for name, parameter in named:
        here = local(parameter)
        if group and (size >= BUCKET_BYTES or local(group[0][1]).dtype != here.dtype):
            yield group
            group, size = [], 0
        group.append((name, parameter))
        size += 4 * here.numel()
    if group:
        yield group
