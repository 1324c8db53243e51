"""Axolotl's keys of length, batches, optimizer, schedule, evaluation and saving."""

from __future__ import annotations

import math
from typing import Any

from rostra.config.axolotl_answers import Part, Rule, to

# Axolotl's name of an optimizer: Rostra's, and the kind of its states.
OPTIMIZERS: dict[str, tuple[str, str]] = {
    name: (own, states)
    for own, states, names in (
        ("adamw", "fp32", "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused"),
        ("adamw", "fp32", "paged_adamw_32bit"),
        ("adamw", "int8", "adamw_bnb_8bit adamw_8bit adamw_torch_8bit ao_adamw_8bit"),
        ("adamw", "int4", "adamw_torch_4bit ao_adamw_4bit"),
        ("adamw", "fp8", "ao_adamw_fp8"),
        ("adamw", "paged_int8", "paged_adamw_8bit"),
        ("sgd", "fp32", "sgd"),
        ("adafactor", "fp32", "adafactor"),
        ("lion", "fp32", "lion_32bit lion_pytorch"),
        ("muon", "fp32", "muon"),
    )
    for name in names.split()
}
UNPAGED = "its states are not paged here; memory.offload.optimizer: cpu frees the device"


def micro_batch(part: Part, key: str, value: Any) -> None:
    size = part.whole(key, value)
    if size is None:
        return
    part.put(key, "train.micro_batch_size", size)
    steps = _accumulation(part, size)
    if steps is None:
        return
    split = _split(part)
    ranks = max(1, part.into.ranks // split)
    said = f"{size} x {steps} x {ranks} rank{'s' * (ranks > 1)}"
    note = f"{said}; Axolotl's batch grows with the ranks, Rostra's stays"
    part.put(key, "train.global_batch_size", size * steps * ranks, note)


def _accumulation(part: Part, size: int) -> int | None:
    total, steps = part.values.get("batch_size"), part.values["gradient_accumulation_steps"]
    if total is None or part.line("gradient_accumulation_steps") is not None:
        return part.whole("gradient_accumulation_steps", steps)
    whole = part.whole("batch_size", total)
    return None if whole is None else max(1, whole // size)


def _split(part: Part) -> int:
    """Ranks that work on one sample together."""
    sizes = (part.values.get(k) for k in ("context_parallel_size", "tensor_parallel_size"))
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def accumulation(part: Part, key: str, value: Any) -> None:
    if part.line(key) is not None:
        part.merge(key, "goes into train.global_batch_size")


def batch_size(part: Part, key: str, value: Any) -> None:
    if part.line("gradient_accumulation_steps") is None:
        part.merge(key, "goes into train.global_batch_size")
    else:
        part.needless(key, "micro_batch_size and gradient_accumulation_steps say it")


def epochs(part: Part, key: str, value: Any) -> None:
    if _steps_given(part):
        part.needless(key, "max_steps goes before it")
    elif (number := part.number(key, value)) is not None:
        part.put(key, "train.epochs", number)


def max_steps(part: Part, key: str, value: Any) -> None:
    if value == -1:
        part.needless(key, "-1: num_epochs decides")
    elif (steps := part.whole(key, value)) is not None:
        part.put(key, "train.steps", steps)


def _steps_given(part: Part) -> bool:
    return part.values.get("max_steps") not in (None, -1)


def optimizer(part: Part, key: str, value: Any) -> None:
    if value not in OPTIMIZERS:
        part.refuse(key, f"no optimizer {value!r} here; known: {', '.join(sorted(OPTIMIZERS))}")
        return
    name, states = OPTIMIZERS[value]
    part.put(key, "optimizer.name", name, UNPAGED if value == "paged_adamw_32bit" else "")
    if name == "sgd":
        part.put(key, "optimizer.momentum", 0.0)
    if states != "fp32" and part.on("deepspeed"):
        part.put(key, "memory.optimizer_states", "fp32", "DeepSpeed has its own optimizer step")
    elif states != "fp32":
        part.put(key, "memory.optimizer_states", states)


def learning_rate(part: Part, key: str, value: Any) -> None:
    rate = part.number(key, value)
    if rate is None:
        return
    part.put(key, "optimizer.learning_rate", rate)
    if part.values.get("optimizer") == "muon":
        part.put(key, "optimizer.matrix_learning_rate", rate, "Axolotl has one for both")


def schedule(part: Part, key: str, value: Any) -> None:
    """The end of cosine and linear is 0 in Axolotl, unless cosine_min_lr_ratio says otherwise."""
    names = {"cosine": "cosine", "linear": "linear", "constant": "constant"}
    names |= {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
    if value not in names:
        part.refuse(key, f"no schedule {value!r} here; known: {', '.join(names)}")
        return
    part.put(key, "schedule.name", names[value])
    if names[value] != "constant" and not part.on("cosine_min_lr_ratio"):
        part.put(key, "schedule.final_fraction", 0.0)


def final_fraction(part: Part, key: str, value: Any) -> None:
    if part.values.get("lr_scheduler") != "cosine":
        part.needless(key, "is for lr_scheduler: cosine")
    elif (number := part.number(key, value)) is not None:
        part.put(key, "schedule.final_fraction", number)


def schedule_arguments(part: Part, key: str, value: Any) -> None:
    left = dict(value) if isinstance(value, dict) else {"?": value}
    decay = left.pop("num_decay_steps", None)
    if decay is not None and part.values.get("lr_scheduler") == "warmup_stable_decay":
        part.put(key, "schedule.decay", decay)
    for name in left:
        part.refuse(key, f"`{name}` has no counterpart in `schedule`; remove it")
    if not left and decay is None:
        part.needless(key, "empty")


def warmup(part: Part, key: str, value: Any) -> None:
    if part.values.get("lr_scheduler") == "constant":
        if key == "warmup_steps" or not part.on("warmup_steps"):
            part.put(key, "schedule.warmup", 0, "`constant` does not warm up")
    elif key == "warmup_ratio" and part.values.get("warmup_steps") is not None:
        part.needless(key, "warmup_steps goes before it")
    elif (number := part.number(key, value)) is not None:
        share = key == "warmup_ratio" or 0 < number < 1
        at_most = "at most 100 steps in Axolotl" if part.line(key) is None else ""
        part.put(key, "schedule.warmup", percent(number) if share else int(number), at_most)


def percent(share: float) -> str:
    return f"{round(100 * share, 6):g}%"


def held_out(part: Part, key: str, value: Any) -> None:
    number = part.number(key, value)
    if number is None:
        return
    if number >= 1:
        part.refuse(key, "a count of examples; Rostra holds out a share: write 0.05, say")
    else:
        part.put(key, "data.held_out", number)


def evaluate_steps(part: Part, key: str, value: Any) -> None:
    if not part.on("val_set_size"):
        part.needless(key, "val_set_size is 0: nothing is held out")
    else:
        _every(part, key, value, "evaluate.every")


def save_steps(part: Part, key: str, value: Any) -> None:
    _every(part, key, value, "checkpoint.every")


def _every(part: Part, key: str, value: Any, path: str) -> None:
    number = part.number(key, value)
    if number is None:
        return
    if number == 0:
        part.needless(key, "0: only at the end")
    elif number >= 1:
        part.put(key, path, int(number))
    elif not isinstance(steps := part.values.get("max_steps"), int) or steps < 1:
        part.refuse(key, f"a share of the run, whose steps are not known; give {path} in steps")
    else:
        part.put(key, path, max(1, round(number * steps)))


def per_epoch(part: Part, key: str, value: Any) -> None:
    what = "evaluation" if key.startswith("eval") else "saving"
    path = {"evaluation": "evaluate.every", "saving": "checkpoint.every"}[what]
    own = "comes at the end" if what == "evaluation" else "comes ten times over the run"
    part.needless(key, f"{what} {own}, and every `{path}` steps where that is set")


def strategy(part: Part, key: str, value: Any) -> None:
    if value == "best":
        part.refuse(key, "the last checkpoints are kept, not the best; remove it")
    else:
        part.needless(key, "evaluate.every and checkpoint.every say when")


def safetensors(part: Part, key: str, value: Any) -> None:
    if value is False:
        part.refuse(key, "weights are written as safetensors alone; remove it")
    else:
        part.needless(key, "weights are always safetensors")


def log_every(part: Part, key: str, value: Any) -> None:
    if (steps := part.whole(key, value)) is not None:
        part.put(key, "monitor.log_every", steps)


def clip(part: Part, key: str, value: Any) -> None:
    number = part.number(key, value)
    if number is not None:
        part.put(key, "stability.clip", number or None)


RULES: dict[str, Rule] = {
    "micro_batch_size": micro_batch,
    "gradient_accumulation_steps": accumulation,
    "batch_size": batch_size,
    "num_epochs": epochs,
    "max_steps": max_steps,
    "optimizer": optimizer,
    "learning_rate": learning_rate,
    "weight_decay": to("optimizer.weight_decay"),
    "adam_beta1": to("optimizer.beta1"),
    "adam_beta2": to("optimizer.beta2"),
    "adam_epsilon": to("optimizer.epsilon"),
    "max_grad_norm": clip,
    "lr_scheduler": schedule,
    "lr_scheduler_kwargs": schedule_arguments,
    "cosine_min_lr_ratio": final_fraction,
    "warmup_steps": warmup,
    "warmup_ratio": warmup,
    "neftune_noise_alpha": to("train.neftune_alpha"),
    "seed": to("run.seed"),
    "val_set_size": held_out,
    "eval_steps": evaluate_steps,
    "evals_per_epoch": per_epoch,
    "eval_strategy": strategy,
    "save_steps": save_steps,
    "saves_per_epoch": per_epoch,
    "save_strategy": strategy,
    "save_total_limit": to("checkpoint.keep"),
    "save_safetensors": safetensors,
    "logging_steps": log_every,
    "use_tensorboard": to("monitor.tensorboard"),
    "torch_compile": to("train.compile"),
    "output_dir": to("run.output"),
}
