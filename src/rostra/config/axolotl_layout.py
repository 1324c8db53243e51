"""Axolotl's keys of FSDP, DeepSpeed, parallel axes, checkpointing and offloading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rostra.config.axolotl_answers import Needless, Part, Rule, answer, every

STRATEGIES = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "no_shard",
    "HYBRID_SHARD": "hybrid_shard",
}

# What the JSON files say that Axolotl ships: the sharding, and what is offloaded to the host.
# The rest of them is "auto" or Rostra's own: batches, precision, clipping.
SHIPPED: dict[str, tuple[str, tuple[str, ...]]] = {
    "zero1": ("zero1", ()),
    "zero1_torch_compile": ("zero1", ()),
    "zero2": ("shard_grad_op", ("optimizer",)),
    "zero2_torch_compile": ("shard_grad_op", ("optimizer",)),
    "zero3": ("full_shard", ()),
    "zero3_bf16": ("full_shard", ()),
    "zero3_bf16_cpuoffload_params": ("full_shard", ("parameters",)),
    "zero3_bf16_cpuoffload_all": ("full_shard", ("parameters", "optimizer")),
    "zero3_cpuoffload": ("full_shard", ("parameters", "optimizer")),
}


def deepspeed(part: Part, key: str, value: Any) -> None:
    """A file that is there (or beside the Axolotl file) is taken as it is; the names of shipped
    ones are known without."""
    if not value:
        part.needless(key, "switched off")
        return
    if isinstance(value, dict):
        part.refuse(key, "write this block to a JSON file, and name that")
        return
    name = Path(str(value)).name.lower().removesuffix(".json")
    beside = Path(part.into.name).parent / str(value)
    file = next((path for path in (Path(str(value)), beside) if path.is_file()), None)
    if part.on("fsdp") or part.on("fsdp_config"):
        part.refuse(key, "fsdp is given too; keep one of them")
    elif file is not None:
        part.put(key, "parallel.engine", "deepspeed")
        part.put(key, "parallel.deepspeed", str(file))
    elif name in SHIPPED:
        _shipped(part, key, name)
    else:
        part.refuse(key, f"no file {value}; known without one: {', '.join(SHIPPED)}")


def _shipped(part: Part, key: str, name: str) -> None:
    sharding, offloaded = SHIPPED[name]
    part.put(key, "parallel.engine", "deepspeed", f"what {name}.json says")
    part.put(key, "parallel.sharding", sharding)
    for kind in offloaded:
        part.put(key, f"memory.offload.{kind}", "cpu")


def fsdp(part: Part, key: str, value: Any) -> None:
    """Version 1 of FSDP: a list, or the words of one; version 2 has `fsdp_config` alone."""
    words = list(map(str, value)) if isinstance(value, list) else str(value or "").split()
    known = {"auto_wrap", "offload", *(name.lower() for name in STRATEGIES)}
    if not words:
        part.needless(key, "switched off")
    for word in words:
        if word not in known:
            part.refuse(key, f"`{word}` is not known; known: {', '.join(sorted(known))}")
        elif word == "offload":
            _offload(part, key)
        elif word == "auto_wrap":
            part.merge(key, "auto_wrap: each layer is cut by itself, always")
        else:
            part.put(key, "parallel.sharding", STRATEGIES[word.upper()])


def fsdp_config(part: Part, key: str, value: Any) -> None:
    """Keys with and without the prefix `fsdp_`: both versions of FSDP write either."""
    if not value:
        part.needless(key, "switched off")
        return
    if not isinstance(value, dict):
        part.refuse(key, "should be a table, such as `offload_params: true`")
        return
    inner = Part(part.into, dict(value), (*part.key, key))
    prefixed = {f"fsdp_{name}": name for name in FSDP_RULES}
    if "sharding" not in part.into.config.get("parallel", {}):
        part.put(key, "parallel.sharding", "full_shard", "what fsdp_config is for")
    answer(inner, FSDP_RULES, "fsdp_config", aliases=prefixed)


def sharding_strategy(part: Part, key: str, value: Any) -> None:
    numbered = dict(enumerate(STRATEGIES, 1))
    name = STRATEGIES.get(str(numbered.get(value, value)).upper())
    if name is None:
        part.refuse(key, f"no strategy {value!r} here; known: {', '.join(STRATEGIES)}")
    else:
        part.put(key, "parallel.sharding", name)


def reshard(part: Part, key: str, value: Any) -> None:
    """False keeps parameters whole from the forward pass on: what SHARD_GRAD_OP does."""
    name = STRATEGIES.get(str(value).upper(), "full_shard" if value else "shard_grad_op")
    hybrid = part.into.config.get("parallel", {}).get("sharding") == "hybrid_shard"
    if hybrid and name in ("full_shard", "hybrid_shard"):
        part.merge(key, "as parallel.sharding = hybrid_shard does")
    elif hybrid:
        part.refuse(key, "hybrid_shard gathers parameters again for the backward pass; remove it")
    else:
        part.put(key, "parallel.sharding", name)


def offload_params(part: Part, key: str, value: Any) -> None:
    if value:
        _offload(part, key)
    else:
        part.needless(key, "switched off")


def _offload(part: Part, key: str) -> None:
    part.put(key, "memory.offload.parameters", "cpu")
    part.put(key, "memory.offload.optimizer", "cpu", "updates are made where parameters lie")


def wrap(part: Part, key: str, value: Any) -> None:
    if value == "SIZE_BASED_WRAP":
        part.refuse(key, "layers are cut, not stretches of a size; use TRANSFORMER_BASED_WRAP")
    else:
        part.needless(key, "each layer is cut by itself, always")


def mixed_precision(part: Part, key: str, value: Any) -> None:
    asked = part.into.config.get("precision", {}).get("compute", "auto")
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(value, value)
    if short in ("bf16", "fp16", "fp32") and asked in ("auto", short):
        part.needless(key, "precision.compute says it")
    else:
        part.refuse(key, f"precision.compute is {asked}; say bf16 or fp16 at the top")


def checkpointing(part: Part, key: str, value: Any) -> None:
    if not value:
        part.needless(key, "switched off")
    elif value in (True, "true", "unsloth", "offload"):
        full = value in (True, "true")
        path = "memory.activation_checkpointing"
        selective = isinstance(part.values.get("selective_checkpointing"), dict | bool)
        if full and (part.on("activation_offloading") or selective):
            part.merge(key, f"another key says which {path}")
        else:
            part.put(key, path, "full" if full else "offload")
    else:
        part.refuse(key, f"{value!r} is not known here; use true, or offload (to the host)")


def activation_offloading(part: Part, key: str, value: Any) -> None:
    if not value:
        part.needless(key, "switched off")
    elif value == "disk":
        part.refuse(key, "activations are offloaded to the host alone; write true")
    else:
        part.put(key, "memory.activation_checkpointing", "offload")


def selective(part: Part, key: str, value: Any) -> None:
    saved = value.get("save", ["attention"]) if isinstance(value, dict) else ["attention"]
    more = set(value) - {"save"} if isinstance(value, dict) else set()
    if value is False:
        part.needless(key, "switched off")
    elif saved != ["attention"] or more:
        part.refuse(key, "here it keeps what attention gives; write `save: [attention]` alone")
    else:
        path, note = "memory.activation_checkpointing", "what attention gives is kept"
        part.put(key, path, "selective:mlp", note)


def context_parallel(part: Part, key: str, value: Any) -> None:
    size = part.whole(key, value)
    if size == 1:
        part.needless(key, "1: a sample is whole")
    elif size is not None:
        part.put(key, "parallel.context", size)
        part.put(key, "parallel.context_method", "ring")


def replicate(part: Part, key: str, value: Any) -> None:
    """Copies of what is sharded: FSDP's hybrid strategy."""
    axis("replicate")(part, key, value)
    if value != 1 and part.into.config.get("parallel", {}).get("sharding") == "full_shard":
        part.put(key, "parallel.sharding", "hybrid_shard")


def axis(name: str) -> Callable[[Part, str, Any], None]:
    """The rule of a size of the mesh."""

    def rule(part: Part, key: str, value: Any) -> None:
        size = part.whole(key, value)
        if size == 1:
            part.needless(key, "1: not split")
        elif size is not None:
            part.put(key, f"parallel.{name}", size)

    return rule


FSDP_RULES: dict[str, Rule] = {
    "sharding_strategy": sharding_strategy,
    "reshard_after_forward": reshard,
    "offload_params": offload_params,
    "activation_checkpointing": checkpointing,
    "auto_wrap_policy": wrap,
    "mixed_precision_policy": mixed_precision,
    **every(
        (
            ("one engine stands for both versions", "version"),
            ("each layer is cut by itself, always", "transformer_layer_cls_to_wrap min_num_params"),
            ("each rank reads what it holds", "cpu_ram_efficient_loading sync_module_states"),
            (
                "checkpoints are in parts, the final model is whole",
                "state_dict_type final_state_dict_type",
            ),
            (
                "parameters are gathered in time by themselves",
                "limit_all_gathers backward_prefetch forward_prefetch",
            ),
            ("parameters keep their shapes", "use_orig_params"),
            ("the host's memory is pinned where that is of use", "cpu_offload_pin_memory"),
        ),
        Needless,
    ),
}

RULES: dict[str, Rule] = {
    "deepspeed": deepspeed,
    "fsdp": fsdp,
    "fsdp_config": fsdp_config,
    "gradient_checkpointing": checkpointing,
    "activation_offloading": activation_offloading,
    "selective_checkpointing": selective,
    "dp_shard_size": axis("shard"),
    "dp_replicate_size": replicate,
    "tensor_parallel_size": axis("tensor"),
    "context_parallel_size": context_parallel,
}
