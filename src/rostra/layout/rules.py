"""The one table of what may be combined with what, whatever the model.

What depends on the model (heads, layers, lengths) is refused where that is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rostra.layout.value import AXES, SHARDED, Layout


@dataclass(frozen=True)
class Rule:
    """A row of the table: which layouts it refuses, why, and what would work.

    `fields` are those of a Layout that it looks at.
    """

    name: str
    fields: tuple[str, ...]
    refuses: Callable[[Layout], bool]
    reason: str

    def __call__(self, layout: Layout) -> str:
        """The refusal in a line: the keys of a config with their values, and the reason."""
        plain = Layout(1, 1)
        unusual = [f for f in self.fields if getattr(layout, f) != getattr(plain, f)]
        return f"{layout.in_config(unusual or self.fields)}: {self.reason}"


CHECKPOINTING = re.compile(r"none|full|offload|selective:(attention|mlp|operations)|every:[1-9]\d*")
_OFFLOADS = ("offload_parameters", "offload_optimizer")


def _cut(x: Layout) -> bool:
    """Whether there are ranks to share the parts of what `sharding` cuts."""
    return x.shard * x.context > 1


RULES: tuple[Rule, ...] = (
    Rule(
        "positive sizes",
        ("micro_batch", "accumulation", "stages", *AXES),
        lambda x: min(x.micro_batch, x.accumulation, x.stages, *(getattr(x, a) for a in AXES)) < 1,
        "every size of a layout is at least 1",
    ),
    Rule(
        "experts stay whole",
        ("expert",),
        lambda x: x.expert > 1,
        "experts are split with their layers by parallel.sharding; set parallel.expert to 1",
    ),
    Rule(
        "replicas hold everything",
        ("sharding", "shard"),
        lambda x: x.sharding == "no_shard" and x.shard > 1,
        "parallel.sharding no_shard keeps everything on every rank, so nothing lies along "
        "`shard`; set parallel.replicate instead, or another parallel.sharding",
    ),
    Rule(
        "hybrid needs a group",
        ("sharding", "shard", "context"),
        lambda x: x.sharding == "hybrid_shard" and not _cut(x),
        "hybrid_shard shards within a group and replicates across groups; set parallel.shard to "
        "the ranks of a node (and parallel.replicate to the nodes), or use no_shard",
    ),
    Rule(
        "only hybrid replicates shards",
        ("engine", "sharding", "replicate"),
        lambda x: (
            x.engine == "torch"
            and x.sharding in ("shard_grad_op", "full_shard")
            and x.replicate > 1
        ),
        "copies of sharded parameters are what hybrid_shard has; set parallel.sharding: "
        "hybrid_shard, or parallel.replicate to 1",
    ),
    Rule(
        "zero1 cuts whole parameters",
        ("engine", "sharding", "tensor", "shard", "context"),
        lambda x: x.engine == "torch" and x.sharding == "zero1" and x.tensor > 1 and _cut(x),
        "the flat stretches of zero1 would cut through a tensor rank's part of a matrix; use "
        "full_shard or no_shard, or parallel.tensor: 1",
    ),
    Rule(
        "a schedule for stages",
        ("pipeline", "pipeline_schedule"),
        lambda x: (x.pipeline > 1) != (x.pipeline_schedule != "none"),
        "parallel.schedule is for parallel.pipeline above 1; set both (1f1b, say) or neither",
    ),
    Rule(
        "several stages a rank",
        ("stages", "pipeline_schedule"),
        lambda x: x.stages > 1 and x.pipeline_schedule not in ("interleaved_1f1b", "zero_bubble"),
        "only interleaved_1f1b and zero_bubble put several stages on a rank; set parallel.stages "
        "to 1, or parallel.schedule: interleaved_1f1b",
    ),
    Rule(
        "interleaving needs stages",
        ("stages", "pipeline_schedule"),
        lambda x: x.pipeline_schedule == "interleaved_1f1b" and x.stages == 1,
        "interleaved_1f1b puts at least two stages on each rank; set parallel.stages: 2, or "
        "parallel.schedule: 1f1b",
    ),
    Rule(
        "zero bubble without tensor",
        ("pipeline_schedule", "tensor"),
        lambda x: x.pipeline_schedule == "zero_bubble" and x.tensor > 1,
        "zero_bubble walks the backward graph in two passes, and finds no way through the "
        "exchanges of tensor parallelism; use interleaved_1f1b or 1f1b, or parallel.tensor: 1",
    ),
    Rule(
        "zero bubble uncompiled",
        ("pipeline_schedule", "compile"),
        lambda x: x.pipeline_schedule == "zero_bubble" and x.compile,
        "zero_bubble splits the backward pass, which a compiled layer does not allow; set "
        "train.compile: false, or parallel.schedule: 1f1b",
    ),
    Rule(
        "zero bubble recomputes whole modules",
        ("pipeline_schedule", "activation_checkpointing"),
        lambda x: (
            x.pipeline_schedule == "zero_bubble"
            and x.activation_checkpointing == "selective:operations"
        ),
        "zero_bubble goes back twice through what selective:operations keeps for one time; use "
        "selective:mlp, selective:attention or full, or parallel.schedule: 1f1b",
    ),
    Rule(
        "known checkpointing",
        ("activation_checkpointing",),
        lambda x: CHECKPOINTING.fullmatch(x.activation_checkpointing) is None,
        "memory.activation_checkpointing is none, full, offload, selective (or "
        "selective:attention, selective:mlp, selective:operations), or every:N",
    ),
    Rule(
        "NVMe is DeepSpeed's",
        ("engine", *_OFFLOADS),
        lambda x: x.engine == "torch" and "nvme" in (x.offload_parameters, x.offload_optimizer),
        "offloading to NVMe is done by DeepSpeed (ZeRO-Infinity); set parallel.engine: deepspeed "
        "with parallel.sharding: full_shard, or offload to cpu",
    ),
    Rule(
        "offloaded parameters are sharded",
        ("engine", "offload_parameters", "sharding", *AXES),
        lambda x: (
            x.engine == "torch"
            and x.offload_parameters != "none"
            and (x.sharding not in SHARDED or x.world_size == 1)
        ),
        "the torch engine offloads what it shards over several ranks; set parallel.sharding: "
        "full_shard on 2 ranks or more, or parallel.engine: deepspeed",
    ),
    Rule(
        "offloaded parameters take the optimizer along",
        ("engine", *_OFFLOADS),
        lambda x: (
            x.engine == "torch" and x.offload_parameters != "none" and x.offload_optimizer == "none"
        ),
        "the torch engine updates parameters where they lie, on the host; set "
        "memory.offload.optimizer: cpu too",
    ),
    Rule(
        "bf16_pure keeps whole parameters",
        ("engine", "compute", "sharding", *AXES),
        lambda x: (
            x.engine == "torch"
            and x.compute == "bf16_pure"
            and (x.tensor > 1 or (x.sharding in SHARDED and x.world_size > 1))
        ),
        "parameters in parts stay float32 on the torch engine, so nothing would be computed in "
        "bfloat16; use precision.compute: bf16, or zero1 with parallel.tensor: 1",
    ),
    Rule(
        "backward updates cannot wait",
        ("optimizer_in_backward", "accumulation"),
        lambda x: x.optimizer_in_backward and x.accumulation > 1,
        "an optimizer that steps in the backward pass sees one micro batch; set "
        "train.micro_batch_size to all samples of a rank, or memory.optimizer_in_backward: false",
    ),
    Rule(
        "backward updates cannot be taken back",
        ("optimizer_in_backward", "compute"),
        lambda x: x.optimizer_in_backward and x.compute == "fp16",
        "fp16 passes over steps that overflow, which an optimizer in the backward pass has "
        "already taken; use precision.compute: bf16",
    ),
    Rule(
        "backward updates are local",
        ("optimizer_in_backward", *AXES),
        lambda x: x.optimizer_in_backward and x.world_size > 1,
        "an optimizer in the backward pass runs in one process, before gradients meet those of "
        "other ranks; use parallel.sharding: full_shard without it",
    ),
    Rule(
        "backward updates change the model itself",
        ("optimizer_in_backward", "compute", "offload_optimizer"),
        lambda x: (
            x.optimizer_in_backward and (x.compute == "bf16_pure" or x.offload_optimizer != "none")
        ),
        "an optimizer in the backward pass updates the model's own weights, and here it has "
        "others (float32, or on the host); set memory.optimizer_in_backward: false",
    ),
    Rule(
        "quantised bases are frozen",
        ("quantization", "adapter"),
        lambda x: x.quantization != "none" and x.adapter == "none",
        "weights of a few bits cannot be trained; set adapter: lora, or quantization: none",
    ),
    Rule(
        "adapters beside whole matrices",
        ("adapter", "tensor"),
        lambda x: x.adapter != "none" and x.tensor > 1,
        "adapters go around layers that tensor parallelism would cut; use parallel.sharding: "
        "full_shard or parallel.pipeline with parallel.tensor: 1",
    ),
    Rule(
        "adapters in float32",
        ("adapter", "compute"),
        lambda x: x.adapter != "none" and x.compute in ("bf16_pure", "fp8"),
        "frozen weights lie in 16 bits under precision.compute: bf16 already, and adapters "
        "train in float32; use bf16",
    ),
    Rule(
        "low-bit states are whole or sharded by row",
        ("optimizer_states", "tensor", "sharding", "shard", "context"),
        lambda x: (
            x.optimizer_states != "fp32" and (x.tensor > 1 or (x.sharding == "zero1" and _cut(x)))
        ),
        "8-bit and 4-bit optimizer states are blocks of rows, which the columns of tensor "
        "parallelism and the stretches of zero1 cut apart; use full_shard with "
        "parallel.tensor: 1, or memory.optimizer_states: fp32",
    ),
    Rule(
        "paged states are CUDA's and whole",
        ("optimizer_states", "sharding", "shard", "context", "offload_optimizer"),
        lambda x: (
            x.optimizer_states == "paged_int8"
            and ((x.sharding in SHARDED and _cut(x)) or x.offload_optimizer != "none")
        ),
        "pages move between a CUDA device and its host by themselves, for parameters that are "
        "whole there; use int8, or parallel.sharding: no_shard without memory.offload",
    ),
    Rule(
        "DeepSpeed splits data alone",
        ("engine", "context", "tensor", "pipeline"),
        lambda x: x.engine == "deepspeed" and x.context * x.tensor * x.pipeline > 1,
        "the deepspeed engine runs ZeRO over data ranks; set parallel.tensor, context and "
        "pipeline to 1, or parallel.engine: torch",
    ),
    Rule(
        "DeepSpeed has its stages",
        ("engine", "sharding"),
        lambda x: x.engine == "deepspeed" and x.sharding == "hybrid_shard",
        "DeepSpeed has no hybrid_shard here; use zero1, shard_grad_op (ZeRO-2) or full_shard "
        "(ZeRO-3), or parallel.engine: torch",
    ),
    Rule(
        "DeepSpeed shards over all data ranks",
        ("engine", "sharding", "replicate"),
        lambda x: (
            x.engine == "deepspeed"
            and x.sharding in ("zero1", "shard_grad_op", "full_shard")
            and x.replicate > 1
        ),
        "ZeRO cuts over all data ranks; set parallel.shard to their number and "
        "parallel.replicate to 1, or parallel.engine: torch",
    ),
    Rule(
        "DeepSpeed keeps masters in partitions",
        ("engine", "sharding", "offload_optimizer", "compute"),
        lambda x: (
            x.engine == "deepspeed"
            and x.sharding == "no_shard"
            and (x.offload_optimizer != "none" or x.compute == "bf16_pure")
        ),
        "DeepSpeed offloads the optimizer, and keeps bf16_pure's float32 weights, in ZeRO's "
        "partitions; set parallel.sharding: zero1 (a single rank may), or parallel.engine: torch",
    ),
    Rule(
        "DeepSpeed offloads all in ZeRO-3",
        ("engine", "sharding", *_OFFLOADS),
        lambda x: (
            x.engine == "deepspeed"
            and x.sharding != "full_shard"
            and (x.offload_parameters != "none" or x.offload_optimizer == "nvme")
        ),
        "DeepSpeed offloads parameters, and anything to nvme, in ZeRO-3 only; set "
        "parallel.sharding: full_shard, or memory.offload.optimizer: cpu alone",
    ),
    Rule(
        "DeepSpeed without fp8",
        ("engine", "compute"),
        lambda x: x.engine == "deepspeed" and x.compute == "fp8",
        "float8 products under DeepSpeed's partitions are not proven; use precision.compute: "
        "bf16, or parallel.engine: torch",
    ),
    Rule(
        "DeepSpeed reduces in float32",
        ("engine", "reduction"),
        lambda x: x.engine == "deepspeed" and x.reduction != "fp32",
        "gradients travel as DeepSpeed has them; set precision.reduction: fp32, or "
        "parallel.engine: torch",
    ),
    Rule(
        "DeepSpeed's optimizer is its own",
        ("engine", "optimizer_states", "optimizer_in_backward", "compile"),
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
