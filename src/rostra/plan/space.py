"""Every legal layout of a job on a cluster: what the config leaves open, as far as the table of
combinations, the model and the devices allow it.

Legality is looked at where it is decided, once for all layouts that share the decision: what the
model allows of an axis when the axis is chosen, the table before the micro batches are listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, prod
from typing import Any

from rostra.build.check import check_optimizer, check_schedule
from rostra.config import Config
from rostra.config.schema import MemorySection, ParallelTable
from rostra.errors import RequestError
from rostra.hardware import Cluster
from rostra.layout import AXES, RULES, Layout, refusals
from rostra.parallel.activations import PARTS
from rostra.parallel.context import check_context
from rostra.parallel.pipeline import takes
from rostra.parallel.pipeline_split import check_stages
from rostra.parallel.tensor import check_tensor
from rostra.plan.axes import as_in_file, choose_axes
from rostra.plan.job import Job

Fields = dict[str, Any]

CHECKPOINTING = (
    "none", "selective:operations", "selective:attention", "selective:mlp", "every:4", "every:2",
    "full", "offload",
)  # fmt: skip
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
STAGES = (1, 2, 4)

# Of large spaces (several nodes, several sets of techniques) what is used there: two ways to
# compute again, schedules that hold few micro batches, groups of whole nodes, no scraps of a
# sample, no micro batch of more positions than fill any device.
THIN_CHECKPOINTING = ("none", "selective:operations", "full")
THIN_SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
THIN_POSITIONS = 1024  # of a rank, where the context is split
THIN_MICRO_BATCH = 1 << 16  # positions

# Rows of the table that look at what the layouts of a block differ in.
_VARIED = {"micro_batch", "accumulation", "activation_checkpointing", "compile"}
_ROWS = tuple(rule for rule in RULES if _VARIED.intersection(rule.fields))


@dataclass(frozen=True)
class Frame:
    """Layouts that differ in their micro batches alone."""

    fields: Fields
    micro_batches: tuple[tuple[int, int], ...]  # with the accumulation that follows, rising

    def __len__(self) -> int:
        return len(self.micro_batches)

    def layout(self, micro_batch: int, accumulation: int) -> Layout:
        return Layout(micro_batch, accumulation, **self.fields)


@dataclass(frozen=True)
class Block:
    """Layouts that lay parameters and optimizer states in the same way: they differ in how they
    keep activations, and in their micro batches."""

    frames: tuple[Frame, ...]

    def __len__(self) -> int:
        return sum(map(len, self.frames))


@dataclass(frozen=True)
class Limits:
    """What a caller settles beside the config. None: open."""

    ranks: int | None = None  # so many, neither fewer nor more
    compile: bool | None = None
    positions: int | None = None  # of a micro batch, at the most
    one_shape: bool = True  # whether all samples have one length, which splitting them needs
    engines: tuple[str, ...] = ("torch", "deepspeed")
    nvme: bool = True
    thin: bool = False  # as on several nodes


class Space:
    """The layouts of `job` on `cluster`, block by block."""

    def __init__(self, job: Job, cluster: Cluster, limits: Limits | None = None) -> None:
        self.job, self.cluster, self.limits = job, cluster, limits or Limits()
        self.thin = self.limits.thin or cluster.nodes > 1
        self.config = job.config
        self.table: ParallelTable | None = None
        self.memory: MemorySection = self.config.memory
        self.asked = self.config.train.micro_batch_size
        if self.config.parallel != "auto":
            file, self.table, self.memory = as_in_file(self.config.parallel, self.memory)
            if self.asked == "auto":
                self.asked = file.get("train_micro_batch_size_per_gpu", self.asked)
        self._refuses = {
            "tensor": cache(self._tensor_refused), "context": cache(self._context_refused),
        }  # fmt: skip

    def __iter__(self) -> Iterator[Layout]:
        for block in self.blocks():
            for frame in block.frames:
                for micro_batch, accumulation in frame.micro_batches:
                    yield frame.layout(micro_batch, accumulation)

    def __contains__(self, layout: object) -> bool:
        """Whether `layout` is one of those that iterating gives, without listing them."""
        if not isinstance(layout, Layout) or layout.world_size not in self.world_sizes():
            return False
        size = layout.micro_batch, layout.accumulation
        return any(
            size in frame.micro_batches and frame.layout(*size) == layout
            for axes in self._axes(layout.world_size) if _has(layout, axes)
            for held in self._held(axes) if _has(layout, held)
            for frame in self._frames(held)
        )  # fmt: skip

    def blocks(self) -> Iterator[Block]:
        for ranks in self.world_sizes():
            for axes in self._axes(ranks):
                for held in self._held(axes):
                    frames = tuple(self._frames(held))
                    if frames:
                        yield Block(frames)

    def world_sizes(self) -> tuple[int, ...]:
        """Ranks that a run may have: parts of a node, and so many whole nodes, that divide all."""
        if self.limits.ranks is not None:
            return (self.limits.ranks,)
        node, nodes = self.cluster.node.devices, _divisors(self.cluster.nodes)
        while len(nodes) > 4:  # of many, every other one
            nodes = nodes[::-2][::-1]
        whole = {node * n for n in (1, *nodes)}
        return tuple(sorted({n for n in _divisors(node) if n < node} | whole))

    def _axes(self, ranks: int) -> Iterator[Fields]:
        """Sizes of the axes, with what is sharded along them and the engine that does it."""
        if self.table is not None:
            try:
                axes = choose_axes(self.table, ranks)
            except RequestError:
                return
            method = self.table.context_method if axes["context"] > 1 else "ulysses"
            fixed = {**axes, "context_method": method, "engine": self.table.engine}
            fed = axes["replicate"] * axes["shard"] <= self.job.global_batch
            if fed and not self._model_refuses(fixed) and self._feeds(fixed):
                yield fixed
            return
        for pipeline in _divisors(ranks):
            for tensor in _divisors(ranks // pipeline):
                for context in _divisors(ranks // pipeline // tensor):
                    data = ranks // pipeline // tensor // context
                    sizes = {"pipeline": pipeline, "tensor": tensor, "context": context}
                    for method in ("ulysses", "ring") if context > 1 else ("ulysses",):
                        axes = {**sizes, "context_method": method}
                        if self._model_refuses(axes) or data > self.job.global_batch:
                            continue
                        if self.thin and 1 < context > self.job.length // THIN_POSITIONS:
                            continue
                        for held in self._shardings(data, context, tensor):
                            if self._feeds(axes | held):
                                yield axes | held

    def _shardings(self, data: int, context: int, tensor: int) -> Iterator[Fields]:
        for engine in self.limits.engines:
            yield {"engine": engine, "sharding": "no_shard", "replicate": data}
            alone = data * context == 1
            for sharding in ("zero1", "shard_grad_op", "full_shard"):
                # DeepSpeed offloads in ZeRO's partitions, also those of a single rank
                if not alone or (engine == "deepspeed" and sharding != "shard_grad_op"):
                    yield {"engine": engine, "sharding": sharding, "shard": data}
            for group in _divisors(data):
                within = group * context * tensor
                node = self.cluster.node.devices
                whole = within % node == 0 or (node % within == 0 and not self.thin)
                if engine == "torch" and group * context > 1 and group < data and whole:
                    copies = {"replicate": data // group, "shard": group}
                    yield {"engine": engine, "sharding": "hybrid_shard", **copies}

    def _model_refuses(self, axes: Fields) -> bool:
        pipeline, context, tensor = (axes[name] for name in ("pipeline", "context", "tensor"))
        if tensor > 1 and self.cluster.node.devices % tensor:
            return True
        if self._refuses["tensor"](tensor, context):
            return True
        if self._refuses["context"](context, tensor, axes["context_method"]):
            return True
        return pipeline > 1 and (pipeline > self.job.sizes.depth or not self._can_be_cut)

    def _tensor_refused(self, tensor: int, context: int) -> bool:
        return _refused(check_tensor, self.job.shape, tensor, self.job.length // context)

    def _context_refused(self, context: int, tensor: int, method: str) -> bool:
        length = self.job.length
        return _refused(check_context, self.job.shape, context, length, tensor, method)

    def _feeds(self, axes: Fields) -> bool:
        """Whether samples come in the one shape that a pipeline and a split context need."""
        return self.limits.one_shape or axes["pipeline"] * axes["context"] == 1

    @cached_property
    def _can_be_cut(self) -> bool:
        return not _refused(check_stages, self.job.shape)

    def _held(self, axes: Fields) -> Iterator[Fields]:
        """With schedule, stages, and what waits on the host."""
        for schedule, stages in self._schedules(axes["pipeline"]):
            for parameters, optimizer in self._offloads(axes["engine"]):
                held = {
                    **axes,
                    "pipeline_schedule": schedule,
                    "stages": stages,
                    "offload_parameters": parameters,
                    "offload_optimizer": optimizer,
                    **self.settled,
                }
                if not self._frame_refused(Layout(1, 1, **held)):
                    yield held

    def _schedules(self, pipeline: int) -> Iterator[tuple[str, int]]:
        if pipeline == 1:
            yield "none", 1
            return
        if self.table is not None:
            yield self.table.schedule or "1f1b", self.table.stages
            return
        for schedule in THIN_SCHEDULES if self.thin else SCHEDULES:
            for stages in STAGES:
                if pipeline * stages <= self.job.sizes.depth:
                    yield schedule, stages

    def _offloads(self, engine: str) -> Iterator[tuple[str, str]]:
        asked = self.memory.offload
        places = ["none"]
        if self.cluster.device.kind == "gpu":
            places.append("cpu")
            if engine == "deepspeed" and self.limits.nvme and self.cluster.node.nvme_bytes:
                places.append("nvme")
        for parameters in places if asked.parameters == "auto" else (asked.parameters,):
            for optimizer in places if asked.optimizer == "auto" else (asked.optimizer,):
                yield parameters, optimizer

    @cached_property
    def settled(self) -> Fields:
        """What the config decides of every layout."""
        config = self.config
        return {
            "compute": computed(config, self.cluster),
            "reduction": config.precision.reduction,
            "quantization": config.quantization.kind,
            "adapter": config.adapter.kind,
            "optimizer_states": self.memory.optimizer_states,
            "optimizer_in_backward": self.memory.optimizer_in_backward,
        }

    def _frame_refused(self, layout: Layout) -> bool:
        if refusals(layout) or layout.pipeline * layout.stages > self.job.sizes.depth:
            return True
        if layout.optimizer_states == "paged_int8" and self.cluster.device.kind != "gpu":
            return True
        if layout.compute not in ("fp32", "bf16_pure") and not self._computes(layout.compute):
            return True
        return _refused(check_optimizer, self.config.optimizer.name, layout) or _refused(
            check_schedule, self.job.shape, layout
        )

    def _computes(self, compute: str) -> bool:
        """fp16 and bf16 run on any device, if slowly; float8 products want its units."""
        return compute != "fp8" or "fp8" in self.cluster.device.flops

    def _frames(self, held: Fields) -> Iterator[Frame]:
        batches = self._micro_batches(held)
        for checkpointing in self._checkpointing:
            for compiled in self._compiles(held):
                fields = {
                    **held, "activation_checkpointing": checkpointing, "compile": compiled,
                }  # fmt: skip
                plain = Layout(*batches[0], **fields)
                if held["pipeline"] > 1:
                    fitting = tuple(x for x in batches if takes(plain, x[1]))
                elif held["optimizer_in_backward"]:
                    fitting = tuple(x for x in batches if x[1] == 1)
                else:
                    fitting = batches
                if fitting and not _varied_refused(replace(plain, accumulation=fitting[0][1])):
                    yield Frame(fields, fitting)

    @cached_property
    def _checkpointing(self) -> tuple[str, ...]:
        asked = self.memory.activation_checkpointing
        if asked != "auto":
            return (asked,)
        layers = [layer for layer, _ in self.job.sizes.layers]
        known = []
        for mode in THIN_CHECKPOINTING if self.thin else CHECKPOINTING:
            kind, _, part = mode.partition(":")
            if part in PARTS and not all(
                {linear.name.split(".")[0] for linear in layer.linears} & set(PARTS[part])
                for layer in layers
            ):
                continue
            if kind == "offload" and self.cluster.device.kind == "cpu":
                continue  # the host is the device
            if kind == "every" and int(part) > self.job.sizes.depth:
                continue
            known.append(mode)
        return tuple(known)

    def _compiles(self, held: Fields) -> tuple[bool, ...]:
        """`auto` compiles in one process on the torch engine only."""
        asked = self.config.train.compile
        if self.limits.compile is not None:
            asked = self.limits.compile
        if asked != "auto":
            return (asked,)
        return (False, True) if _ranks(held) == 1 and held["engine"] == "torch" else (False,)

    def _micro_batches(self, held: Fields) -> tuple[tuple[int, int], ...]:
        data = held.get("replicate", 1) * held.get("shard", 1)
        rows = ceil(self.job.global_batch / data)
        if self.asked != "auto":
            sizes: Sequence[int] = (min(self.asked, rows),)
        else:
            powers = {1 << n for n in range(rows.bit_length())}
            sizes = sorted(powers | set(_divisors(rows)))
            most = self.limits.positions or (THIN_MICRO_BATCH if self.thin else None)
            if most is not None:
                length = max(1, self.job.length // held["context"])
                sizes = [n for n in sizes if n <= max(1, most // length)]
        return tuple((n, ceil(rows / n)) for n in sizes)


def computed(config: Config, cluster: Cluster) -> str:
    """`precision.compute`, decided: bf16 where the device computes it faster than float32."""
    if config.precision.compute != "auto":
        return config.precision.compute
    flops = cluster.device.flops
    return "bf16" if flops.get("bf16", 0.0) > flops.get("fp32", 0.0) else "fp32"


def _has(layout: Layout, fields: Fields) -> bool:
    return all(getattr(layout, name) == value for name, value in fields.items())


def _varied_refused(layout: Layout) -> bool:
    return any(rule.refuses(layout) for rule in _ROWS)


def _ranks(fields: Fields) -> int:
    return prod(fields.get(axis, 1) for axis in AXES)


def _refused(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except RequestError:
        return True
    return False


@cache
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(k for k in range(1, n + 1) if n % k == 0)
