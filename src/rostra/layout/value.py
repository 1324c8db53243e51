"""The frozen `Layout`, and the keys of a config that decide its fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

# The order of the mesh: ranks next to each other share the last axes, which talk most.
AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")

Compute = Literal["fp32", "bf16", "fp16", "bf16_pure", "fp8"]
Sharding = Literal["no_shard", "zero1", "shard_grad_op", "hybrid_shard", "full_shard"]
Schedule = Literal["none", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Place = Literal["none", "cpu", "nvme"]
Quantization = Literal["none", "nf4", "fp4", "int8"]
Adapter = Literal["none", "lora", "prompt", "prefix", "ia3"]
OptimizerStates = Literal["fp32", "int8", "int4", "fp8", "paged_int8"]

SHARDED = ("shard_grad_op", "hybrid_shard", "full_shard")  # parameters lie in parts

# The key of a config that decides a field. `accumulation` has none: it follows from
# train.global_batch_size, the data ranks and train.micro_batch_size.
KEYS = {
    "micro_batch": "train.micro_batch_size",
    "engine": "parallel.engine",
    **{axis: f"parallel.{axis}" for axis in AXES},
    "sharding": "parallel.sharding",
    "context_method": "parallel.context_method",
    "pipeline_schedule": "parallel.schedule",
    "stages": "parallel.stages",
    "activation_checkpointing": "memory.activation_checkpointing",
    "offload_parameters": "memory.offload.parameters",
    "offload_optimizer": "memory.offload.optimizer",
    "compute": "precision.compute",
    "reduction": "precision.reduction",
    "quantization": "quantization.kind",
    "adapter": "adapter.kind",
    "optimizer_states": "memory.optimizer_states",
    "optimizer_in_backward": "memory.optimizer_in_backward",
    "compile": "train.compile",
}


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
    context_method: Literal["ulysses", "ring"] = "ulysses"
    pipeline_schedule: Schedule = "none"
    stages: int = 1  # pipeline stages of one rank
    # none, full, selective:attention|mlp|operations, every:N, offload
    activation_checkpointing: str = "none"
    offload_parameters: Place = "none"
    offload_optimizer: Place = "none"
    compute: Compute = "fp32"
    reduction: Literal["fp32", "bf16"] = "fp32"
    quantization: Quantization = "none"  # of the frozen base
    adapter: Adapter = "none"
    optimizer_states: OptimizerStates = "fp32"
    optimizer_in_backward: bool = False
    compile: bool = False

    @property
    def world_size(self) -> int:
        ranks = self.pipeline * self.replicate * self.shard  # of AXES; written out, as it is quick
        return ranks * self.context * self.tensor * self.expert

    @property
    def data(self) -> int:
        """Ranks along the axes that split the global batch into samples."""
        return self.replicate * self.shard

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass goes through the graph in two parts, for what enters a stage
        and for its weights."""
        return self.pipeline_schedule == "zero_bubble"

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
            if key not in ("micro_batch", "accumulation") and value != plain[key]
        ]
        return ", ".join(named) or "one process"

    def in_config(self, names: Iterable[str], sign: str = " = ") -> str:
        """The fields `names` as a config has them, `parallel.tensor = 2, train.compile = true`."""
        shown = []
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool):
                value = str(value).lower()
            elif name == "pipeline_schedule" and value == "none":
                value = "null"
            shown.append(f"{KEYS.get(name, name)}{sign}{value}")
        return ", ".join(shown)
