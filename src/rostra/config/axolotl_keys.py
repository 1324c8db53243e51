"""Every key of Axolotl's files (version 0.19: src/axolotl/utils/schemas, and the args.py of its
integrations), with what becomes of it."""

from __future__ import annotations

from typing import Any

from rostra.config import axolotl_data, axolotl_layout, axolotl_model, axolotl_training
from rostra.config.axolotl_answers import Needless, Part, Refused, Rule, every
from rostra.config.axolotl_rest import KERNEL, LOSS, NEEDLESS, REFUSED, TRACK

# Names of other tools, and what is meant: Axolotl passes over them.
SLIPS = {
    "sequence_length": "sequence_len",
    "max_seq_length": "sequence_len",
    "adam_eps": "adam_epsilon",
    "lr_scheduler_type": "lr_scheduler",
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
}
# Further names that Axolotl itself knows.
ALIASES = {
    "evaluation_strategy": "eval_strategy",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "sequence_parallel_degree": "context_parallel_size",
    "type_of_model": "model_type",
    "revision_of_model": "model_revision",
    "overrides_of_model_config": "model_config",
    "overrides_of_model_kwargs": "model_kwargs",
}

# What holds in Axolotl where a file says nothing, as far as Rostra's own default is another.
DEFAULTS: dict[str, Any] = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1.0,
    "optimizer": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "lr_scheduler": "cosine",
    "warmup_ratio": 0.03,
    "val_set_size": 0.0,
    "sample_packing": False,
    "excess_length_strategy": "drop",
    "output_dir": "./model-out",
}

KERNELS = ("axolotl.integrations.liger", "axolotl.integrations.cut_cross_entropy")


def plugins(part: Part, key: str, value: Any) -> None:
    for name in value if isinstance(value, list) else [value]:
        if str(name).startswith(KERNELS):
            part.needless(key, f"{name}: {LOSS}")
        elif "swanlab" in str(name):
            part.needless(key, f"{name}: {TRACK}")
        elif ".kernels" in str(name):
            part.needless(key, f"{name}: {KERNEL}")
        else:
            part.refuse(key, f"{name} is Axolotl's own code; remove it, with the keys it reads")
    if not value:
        part.needless(key, "empty")


def compile_backend(part: Part, key: str, value: Any) -> None:
    if value in ("inductor", "default"):
        part.needless(key, "as train.compile does")
    else:
        part.refuse(key, f"train.compile has no {value!r}; remove it")


KEYS: dict[str, Rule] = {
    **axolotl_model.RULES,
    **axolotl_data.RULES,
    **axolotl_training.RULES,
    **axolotl_layout.RULES,
    "plugins": plugins,
    "torch_compile_backend": compile_backend,
    "torch_compile_mode": compile_backend,
    **every(NEEDLESS, Needless),
    **every(REFUSED, Refused),
}
