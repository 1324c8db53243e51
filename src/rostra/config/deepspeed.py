"""DeepSpeed's config: read from a user's JSON as it is, or made from Rostra's own keys.

Rostra owns the batch, the learning rate, clipping and the precision. Where a file says these
too, it must say the same or "auto"; all else in it is passed on.
"""

from __future__ import annotations

import json
import math
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rostra.config.deepspeed_keys import KEYS, REFUSED
from rostra.config.schema import OptimizerSection
from rostra.errors import RequestError
from rostra.layout import Layout, explain

STAGES = {"no_shard": 0, "zero1": 1, "shard_grad_op": 2, "full_shard": 3}
AUTO = "auto"


def read_deepspeed(path: str | Path) -> dict[str, Any]:
    """A DeepSpeed JSON file: comments (// # /* */) and commas before a closing bracket are
    allowed, `1e9` and "1e9" are whole numbers where those are meant, "auto" stays.

    Raises RequestError for a file that cannot be read, and for every key that is not
    understood, with the nearest that is.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot read this DeepSpeed config: {error}") from error
    try:
        values = json.loads(_plain(text), object_pairs_hook=_once)
    except ValueError as error:
        raise RequestError(f"{path}: is not a DeepSpeed config in JSON: {error}") from error
    try:
        checked: dict[str, Any] = _checked(values, KEYS, "")
    except ValueError as error:
        raise RequestError(f"{path}: {error}") from error
    return checked


# A string, a comment, or a comma with nothing but space and comments before a bracket.
_COMMENT = r"//[^\n]*|\#[^\n]*|/\*.*?\*/"
_TOKEN = re.compile(
    rf'"(?:\\.|[^"\\])*"|(?P<comment>{_COMMENT})|(?P<comma>,)(?=(?:\s|{_COMMENT})*[}}\]])', re.S
)


def _plain(text: str) -> str:
    """The text as JSON; what is taken out leaves its lines and columns behind."""

    def kept(match: re.Match[str]) -> str:
        blank = match["comment"] or match["comma"]
        return match[0] if blank is None else re.sub(r"[^\n]", " ", match[0])

    return _TOKEN.sub(kept, text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"`{twice[0]}` is given twice")
    return dict(pairs)


def _checked(values: Any, keys: dict[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{path or 'the file'} must be a block {{...}}, not {values!r}")
    found: dict[str, Any] = {}
    names = {known.lower(): known for known in keys}
    for written, value in values.items():
        key = names.get(str(written).lower()) or str(written)  # guides write ZeRO_optimization
        full = f"{path}.{key}" if path else key
        if key in found:
            raise ValueError(f"`{full}` is given twice")
        if full in REFUSED:
            raise ValueError(f"`{full}` is not taken: {REFUSED[full]}")
        if key not in keys:
            raise ValueError(_unknown(key, keys, full))
        kind = keys[key]
        if isinstance(kind, dict):
            found[key] = _checked(value, kind, full)
        else:
            found[key] = value if value == AUTO else _value(value, kind, full)
    return found


def _unknown(key: str, keys: dict[str, Any], full: str) -> str:
    lower = {known.lower(): known for known in keys}
    near = get_close_matches(key.lower(), lower, 1, 0.5)
    meant = f"; did you mean `{lower[near[0]]}`?" if near else f"; known: {', '.join(keys)}"
    return f"`{full}` is not a key of DeepSpeed's config{meant}"


_TYPES = {"flag": bool, "text": str, "list": list, "table": dict}


def _value(value: Any, kind: str, path: str) -> Any:
    if kind in ("whole", "number"):
        return _number(value, kind, path)
    if kind in _TYPES:
        if isinstance(value, _TYPES[kind]) or (kind == "text" and value is None):
            return value
        names = {"flag": "true or false", "text": "text", "list": "a list", "table": "a block"}
        raise ValueError(f"`{path}` must be {names[kind]}, not {value!r}")
    words = kind.split("|")
    if value is None or value in words:
        return value or words[0]
    raise ValueError(f"`{path}` must be one of {', '.join(words)}, not {value!r}")


def _number(value: Any, kind: str, path: str) -> int | float:
    meant = "a whole number" if kind == "whole" else "a number"
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number) or (kind == "whole" and not number.is_integer()):
        raise ValueError(f"`{path}` must be {meant}, not {value!r}")
    if kind == "number":
        return number
    return value if isinstance(value, int) else int(number)


def layout_keys(user: dict[str, Any]) -> dict[str, str]:
    """The fields of a `Layout` that a file decides by itself: `sharding` and the offloads.

    What it leaves out or to "auto" is not in the answer. Raises RequestError for a stage that
    there is not.
    """
    zero = user.get("zero_optimization", {})
    found = {}
    if (stage := zero.get("stage", AUTO)) != AUTO:
        names = {number: name for name, number in STAGES.items()}
        if stage not in names:
            raise RequestError(f"zero_optimization.stage = {stage}: must be 0, 1, 2 or 3")
        found["sharding"] = names[stage]
    blocks = {"offload_parameters": "offload_param", "offload_optimizer": "offload_optimizer"}
    for field, block in blocks.items():
        if (device := zero.get(block, {}).get("device", AUTO)) != AUTO:
            found[field] = device
    return found


def deepspeed_config(
    layout: Layout,
    optimizer: OptimizerSection,
    *,
    clip: float | None,
    samples: int,
    parameters: int,
    largest: int = 0,
    nvme_path: str | None = None,
    user: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole config that DeepSpeed is started with.

    `samples` are those of a global batch, `parameters` those of the model, `largest` the numbers
    of its largest one; `nvme_path` is the folder on the NVMe device. `user` is a file's content
    from `read_deepspeed`. Clipping and the optimizer are not in the answer: the engine brings
    both.

    Raises RequestError for a layout that the table of combinations refuses, and where the file and
    Rostra's own keys say different things.
    """
    if refused := explain(layout):
        raise RequestError(refused)
    ours = _own_config(layout, parameters, largest, nvme_path)
    given = user or {}
    _check_owned(given, _owned(layout, optimizer, clip, samples, nvme_path))
    _check_precision(given, layout)
    _check_optimizer(given, optimizer)
    kept = {k: v for k, v in given.items() if k not in ("optimizer", "scheduler", "fp16")}
    config = fill_auto(kept, ours)
    config.pop("train_batch_size", None)  # follows from the next two, and the number of ranks
    config |= {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "gradient_clipping": 0.0,  # by the engine
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    _check_nvme_path(config)
    return config


def fill_auto(user: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """`user` with our value for each "auto" and for what it leaves out; an "auto" for which we
    have none is left out, so that DeepSpeed's own default holds."""
    filled = {key: value for key, value in ours.items() if key not in user}
    for key, value in user.items():
        if isinstance(value, dict):
            filled[key] = fill_auto(value, ours.get(key) or {})
        elif value != AUTO:
            filled[key] = value
        elif key in ours:
            filled[key] = ours[key]
    return filled


def bucket_numbers(parameters: int) -> int:
    """Numbers of a bucket in which gradients travel, or parameters come together."""
    return max(1, min(50_000_000, parameters))


def swapped_numbers(largest: int, ranks: int) -> int:
    """Numbers of a buffer through which parameters come from NVMe: DeepSpeed's own, or what a
    rank has of the largest parameter, which DeepSpeed refuses if it is larger."""
    return max(100_000_000, -(-largest // ranks))


def _own_config(
    layout: Layout, parameters: int, largest: int, nvme_path: str | None
) -> dict[str, Any]:
    """What Rostra asks for where no file does. Buckets are small beside what is sharded, and
    parameters that stay whole on every rank are few."""
    bucket = bucket_numbers(parameters)
    zero: dict[str, Any] = {
        "stage": STAGES[layout.sharding],
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if layout.sharding == "full_shard":
        zero["memory_efficient_linear"] = False  # it would replace torch's for the whole process
        zero["stage3_prefetch_bucket_size"] = bucket
        zero["stage3_param_persistence_threshold"] = min(100_000, parameters // 10_000)
    for block, place in (
        ("offload_param", layout.offload_parameters),
        ("offload_optimizer", layout.offload_optimizer),
    ):
        if place != "none":
            path = {"nvme_path": nvme_path} if place == "nvme" and nvme_path else {}
            zero[block] = {"device": place, **path}
    if layout.offload_parameters == "nvme":
        zero["offload_param"]["buffer_size"] = swapped_numbers(largest, layout.data)
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": layout.compute == "bf16_pure"},
        "torch_autocast": {"enabled": False},  # the engine's own is inside
    }


Owned = dict[str, tuple[Any, str]]  # path in DeepSpeed's file: our value, and our key


def _owned(
    layout: Layout, optimizer: OptimizerSection, clip: float | None, samples: int, nvme: str | None
) -> Owned:
    micro, accumulation = layout.micro_batch, layout.accumulation
    zero = "zero_optimization"
    owned: Owned = {
        "train_batch_size": (samples, "train.global_batch_size"),
        "train_micro_batch_size_per_gpu": (micro, "train.micro_batch_size"),
        "gradient_accumulation_steps": (accumulation, "the micro batches of a rank"),
        "gradient_clipping": (clip or 0.0, "stability.clip"),
        f"{zero}.stage": (
            STAGES[layout.sharding],
            f"the stage of parallel.sharding ({layout.sharding})",
        ),
        f"{zero}.offload_param.device": (layout.offload_parameters, "memory.offload.parameters"),
        f"{zero}.offload_optimizer.device": (layout.offload_optimizer, "memory.offload.optimizer"),
        "optimizer.params.lr": (optimizer.learning_rate, "optimizer.learning_rate"),
        "optimizer.params.betas": ([optimizer.beta1, optimizer.beta2], "optimizer.beta1, beta2"),
        "optimizer.params.eps": (optimizer.epsilon, "optimizer.epsilon"),
        "optimizer.params.weight_decay": (optimizer.weight_decay, "optimizer.weight_decay"),
    }
    if nvme is not None:
        for block in ("offload_param", "offload_optimizer"):
            owned[f"{zero}.{block}.nvme_path"] = (nvme, "memory.offload.path")
    return owned


def _check_owned(user: dict[str, Any], owned: Owned) -> None:
    for path, (mine, key) in owned.items():
        said = _at(user, path)
        if said not in (AUTO, mine):
            raise RequestError(
                f"the DeepSpeed config says {path} = {said}, but {key} = {mine}; write "
                f'"auto" there, or make them the same'
            )


def _at(values: dict[str, Any], path: str) -> Any:
    """The value at a path of keys; "auto" when there is none."""
    for key in path.split("."):
        values = values.get(key, AUTO) if isinstance(values, dict) else AUTO
    return values


def _check_precision(user: dict[str, Any], layout: Layout) -> None:
    if _at(user, "bf16.enabled") is True and layout.compute not in ("bf16", "bf16_pure"):
        raise RequestError(
            f"the DeepSpeed config says bf16.enabled = true, but precision.compute = "
            f'{layout.compute}; write "auto" there, or set precision.compute: bf16'
        )
    if _at(user, "bf16.enabled") is True and layout.sharding == "no_shard":
        raise RequestError(
            "the DeepSpeed config says bf16.enabled = true with stage 0, where the float32 "
            'weights have no place; write "auto" there, or use stage 1, 2 or 3'
        )
    for block in ("fp16", "torch_autocast"):
        if _at(user, f"{block}.enabled") is True:
            raise RequestError(
                f"the DeepSpeed config says {block}.enabled = true: Rostra casts and scales the "
                'loss itself; write "auto" there, and set precision.compute: fp16 or bf16'
            )


def _check_optimizer(user: dict[str, Any], optimizer: OptimizerSection) -> None:
    name = str(_at(user, "optimizer.type"))
    # DeepSpeed's Adam decays as AdamW does unless told otherwise
    same = name.lower() in (AUTO, optimizer.name, *(["adam"] * (optimizer.name == "adamw")))
    if not same or _at(user, "optimizer.params.adam_w_mode") is False:
        raise RequestError(
            f"the DeepSpeed config says optimizer.type = {name}, but optimizer.name = "
            f"{optimizer.name}; leave the block out, or make them the same"
        )
    params = _at(user, "scheduler.params")
    said = [k for k, v in params.items() if v != AUTO] if isinstance(params, dict) else []
    if said:
        raise RequestError(
            f"the DeepSpeed config says scheduler.params.{said[0]} = {params[said[0]]}, but the "
            "learning rate follows Rostra's `schedule`; leave the block out, and set that"
        )


def _check_nvme_path(config: dict[str, Any]) -> None:
    for block in ("offload_param", "offload_optimizer"):
        asked = config["zero_optimization"].get(block, {})
        if asked.get("device") == "nvme" and not asked.get("nvme_path"):
            raise RequestError(
                f"memory.offload: {block} goes to nvme, but no folder is given; set "
                "memory.offload.path to one on the NVMe device, or offload to cpu"
            )
