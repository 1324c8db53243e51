"""How a model and its work lie over devices: one frozen value, and the one table of what
may be combined with what.

The planner proposes a `Layout`, the engine executes it, checkpoints and reports carry it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any, Literal, Self

# The order of the mesh: ranks next to each other share the last axes, which talk most.
AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")

Compute = Literal["fp32", "bf16", "fp16", "bf16_pure", "fp8"]
Sharding = Literal["no_shard", "zero1", "shard_grad_op", "hybrid_shard", "full_shard"]
Schedule = Literal["none", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Place = Literal["none", "cpu", "nvme"]
OptimizerStates = Literal["fp32", "int8", "int4", "fp8", "paged_int8"]

SHARDED = ("shard_grad_op", "hybrid_shard", "full_shard")  # parameters lie in parts


@dataclass(frozen=True)
class Layout:
    """All that decides memory and time of a step; equal layouts cost the same."""

    micro_batch: int  # samples a rank computes at once
    accumulation: int  # micro batches of a rank in one optimizer step
    engine: Literal["torch", "deepspeed"] = "torch"
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sharding: Sharding = "no_shard"
    pipeline_schedule: Schedule = "none"
    stages: int = 1  # pipeline stages of one rank
    # none, full, selective:attention|mlp|operations, every:N, offload
    activation_checkpointing: str = "none"
    offload_parameters: Place = "none"
    offload_optimizer: Place = "none"
    compute: Compute = "fp32"
    reduction: Literal["fp32", "bf16"] = "fp32"
    quantization: Literal["none"] = "none"
    adapter: Literal["none"] = "none"
    optimizer_states: OptimizerStates = "fp32"
    optimizer_in_backward: bool = False
    compile: bool = False

    @property
    def world_size(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """Ranks along the axes that split the global batch into samples."""
        return self.replicate * self.shard

    @property
    def distributed(self) -> bool:
        return self.world_size > 1 or self.engine == "deepspeed"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"not a key of a layout: {', '.join(unknown)}")
        return cls(**values)

    def describe(self) -> str:
        """The layout in a line: what differs from one plain process."""
        plain = {f.name: f.default for f in fields(type(self))}
        named = [
            f"{key}={value}" if not isinstance(value, bool) else key
            for key, value in self.to_dict().items()
            if key not in ("micro_batch", "accumulation", "compute") and value != plain[key]
        ]
        return ", ".join(named) or "one process"


@dataclass(frozen=True)
class Rule:
    """A row of the table: which layouts it refuses, why, and what would work."""

    name: str
    refuses: Callable[[Layout], bool]
    reason: str


CHECKPOINTING = re.compile(r"none|full|offload|selective:(attention|mlp|operations)|every:[1-9]\d*")


def _dp_only(x: Layout) -> bool:
    return x.tensor == x.context == x.pipeline == x.expert == 1


RULES: tuple[Rule, ...] = (
    Rule(
        "positive sizes",
        lambda x: min(x.micro_batch, x.accumulation, x.stages, *(getattr(x, a) for a in AXES)) < 1,
        "every size of a layout is at least 1",
    ),
    Rule(
        "experts stay whole",
        lambda x: x.expert > 1,
        "experts are split with their layers by parallel.sharding; set parallel.expert to 1",
    ),
    Rule(
        "replicas hold everything",
        lambda x: x.sharding == "no_shard" and x.shard > 1,
        "parallel.sharding no_shard keeps everything on every rank, so nothing lies along "
        "`shard`; set parallel.replicate instead, or another parallel.sharding",
    ),
    Rule(
        "hybrid needs both",
        lambda x: x.sharding == "hybrid_shard" and x.shard * x.context == 1,
        "hybrid_shard shards within a group and replicates across groups; set parallel.shard to "
        "the ranks of a node (and parallel.replicate to the nodes), or use no_shard",
    ),
    Rule(
        "only hybrid replicates shards",
        lambda x: x.sharding in ("shard_grad_op", "full_shard") and x.replicate > 1,
        "with parallel.replicate above 1, sharded parameters are sharding: hybrid_shard; or set "
        "parallel.replicate to 1",
    ),
    Rule(
        "a schedule for stages",
        lambda x: (x.pipeline > 1) != (x.pipeline_schedule != "none"),
        "parallel.schedule is for parallel.pipeline above 1; set both (1f1b, say) or neither",
    ),
    Rule(
        "several stages a rank",
        lambda x: x.stages > 1 and x.pipeline_schedule not in ("interleaved_1f1b", "zero_bubble"),
        "only interleaved_1f1b and zero_bubble put several stages on a rank; set parallel.stages "
        "to 1, or parallel.schedule: interleaved_1f1b",
    ),
    Rule(
        "interleaving needs stages",
        lambda x: x.pipeline_schedule == "interleaved_1f1b" and x.stages == 1,
        "interleaved_1f1b puts at least two stages on each rank; set parallel.stages: 2, or "
        "parallel.schedule: 1f1b",
    ),
    Rule(
        "known checkpointing",
        lambda x: CHECKPOINTING.fullmatch(x.activation_checkpointing) is None,
        "memory.activation_checkpointing is none, full, offload, selective (or "
        "selective:attention, selective:mlp, selective:operations), or every:N",
    ),
    Rule(
        "NVMe is DeepSpeed's",
        lambda x: x.engine == "torch" and "nvme" in (x.offload_parameters, x.offload_optimizer),
        "offloading to NVMe is done by DeepSpeed (ZeRO-Infinity); set parallel.engine: deepspeed, "
        "or offload to cpu",
    ),
    Rule(
        "offloaded parameters are sharded",
        lambda x: (
            x.engine == "torch" and x.offload_parameters != "none" and x.sharding not in SHARDED
        ),
        "parameters are offloaded where they are sharded; set parallel.sharding: full_shard",
    ),
    Rule(
        "offloaded parameters take the optimizer along",
        lambda x: x.offload_parameters != "none" and x.offload_optimizer == "none",
        "parameters that live in host memory are updated there; set memory.offload.optimizer to "
        "the same place",
    ),
    Rule(
        "bf16_pure under sharding",
        lambda x: x.compute == "bf16_pure" and x.sharding in SHARDED,
        "sharded parameters are float32 already and gathered in bfloat16; use "
        "precision.compute: bf16",
    ),
    Rule(
        "backward updates cannot wait",
        lambda x: x.optimizer_in_backward and (x.accumulation > 1 or x.pipeline > 1),
        "an optimizer that steps in the backward pass sees one micro batch; set "
        "train.micro_batch_size so that a rank has one, and no pipeline",
    ),
    Rule(
        "backward updates cannot be taken back",
        lambda x: x.optimizer_in_backward and x.compute == "fp16",
        "fp16 passes over steps that overflow, which an optimizer in the backward pass has "
        "already taken; use precision.compute: bf16",
    ),
    Rule(
        "backward updates are local",
        lambda x: x.optimizer_in_backward and (x.world_size > 1 or x.compute == "bf16_pure"),
        "an optimizer in the backward pass runs in one process, before gradients meet those of "
        "other ranks; use parallel.sharding: full_shard without it",
    ),
    Rule(
        "low-bit states are whole or sharded by row",
        lambda x: x.optimizer_states != "fp32" and (x.tensor > 1 or x.sharding == "zero1"),
        "8-bit and 4-bit optimizer states are blocks of a parameter, which tensor parallelism and "
        "zero1 cut apart; use full_shard, or memory.optimizer_states: fp32",
    ),
    Rule(
        "paged states are CUDA's",
        lambda x: x.optimizer_states == "paged_int8" and x.sharding in SHARDED,
        "paged optimizers do not take sharded parameters; use int8, or parallel.sharding: no_shard",
    ),
    Rule(
        "DeepSpeed splits data alone",
        lambda x: x.engine == "deepspeed" and not _dp_only(x),
        "the deepspeed engine runs ZeRO over data ranks; set parallel.tensor, context and "
        "pipeline to 1, or parallel.engine: torch",
    ),
    Rule(
        "DeepSpeed has its stages",
        lambda x: x.engine == "deepspeed" and x.sharding == "hybrid_shard",
        "DeepSpeed has no hybrid_shard here; use zero1, shard_grad_op (ZeRO-2) or full_shard "
        "(ZeRO-3), or parallel.engine: torch",
    ),
    Rule(
        "DeepSpeed's optimizer is its own",
        lambda x: (
            x.engine == "deepspeed"
            and (x.optimizer_states != "fp32" or x.optimizer_in_backward or x.compile)
        ),
        "the deepspeed engine has its own optimizer step: no low-bit states, no optimizer in the "
        "backward pass, no train.compile; or set parallel.engine: torch",
    ),
)


def refusals(layout: Layout) -> list[Rule]:
    """The rows of the table that refuse `layout`; none when it is legal."""
    return [rule for rule in RULES if rule.refuses(layout)]
