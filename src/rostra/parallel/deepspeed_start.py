"""What comes before DeepSpeed's engine: its import, its optimizer, weights into its partitions."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rostra.config.schema import OptimizerSection
from rostra.errors import RequestError
from rostra.layout import Layout
from rostra.optim import Optimizers, make_optimizers
from rostra.parallel.deepspeed_state import Named
from rostra.pieces import Reader, fill
from rostra.workers import on_every_rank


def import_deepspeed(device: torch.device) -> Any:
    """The `deepspeed` module, made for `device` and quiet. Raises RequestError without it."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # looked at when it is imported
    # DeepSpeed takes the device of this number, and asks for it on the CPU too
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    try:
        with off_standard_output():  # its logger keeps the stream that it finds here
            import deepspeed  # type: ignore[import-untyped]
    except ImportError as error:
        raise RequestError(
            "parallel.engine: deepspeed is not installed; run: pip install "
            '"rostra[deepspeed]", or set parallel.engine: torch'
        ) from error
    # DeepSpeed calls collectives by names that torch is about to change
    warnings.filterwarnings("ignore", r".*is deprecated", FutureWarning, r"torch\.distributed")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


@contextmanager
def own_group(device: torch.device) -> Iterator[bool]:
    """DeepSpeed works in a process group, a single rank too. Whether one was started for the
    engine that is made inside: it then ends with that, or when none comes of it."""
    if dist.is_initialized():
        yield False
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield True
    except BaseException:
        dist.destroy_process_group()
        raise


def off_standard_output() -> AbstractContextManager[Any]:
    """DeepSpeed prints what it compiles; standard output is for results."""
    return redirect_stdout(sys.stderr)


def make_deepspeed_optimizers(
    section: OptimizerSection,
    named: Named,
    embeddings: set[str],
    layout: Layout,
    ratio: float | None = None,
) -> Optimizers:
    """The optimizer of the config for DeepSpeed, which flattens parameters: it must work
    number by number. AdamW runs on the host as DeepSpeed's own where it is offloaded.

    Raises RequestError where that cannot be compiled.
    """
    shaped = [(name, _shaped(p)) for name, p in named]
    part = make_optimizers(section, shaped, embeddings, ratio=ratio).parts[0]
    own = {id(stand_in): p for (_, stand_in), (_, p) in zip(shaped, named, strict=True)}
    for group in part.param_groups:
        group["params"] = [own[id(p)] for p in group["params"]]
    names: dict[Tensor, str] = {p: name for name, p in named}
    if layout.offload_optimizer == "none" or section.name != "adamw":
        return Optimizers([part], names)
    adam = import_deepspeed(named[0][1].device).ops.adam.DeepSpeedCPUAdam
    groups = [
        {key: group[key] for key in ("params", "weight_decay", "lr")} for group in part.param_groups
    ]
    betas = (section.beta1, section.beta2)
    try:
        with off_standard_output():
            part = adam(groups, lr=section.learning_rate, betas=betas, eps=section.epsilon)
    except RuntimeError as error:
        raise RequestError(
            "memory.offload.optimizer: DeepSpeed's Adam for the host could not be compiled "
            f"({error.__cause__ or error}); install g++ and ninja, or set it to none"
        ) from error
    return Optimizers([part], names)


def _shaped(parameter: nn.Parameter) -> nn.Parameter:
    """Of the whole parameter's shape, which decides its decay: ZeRO-3 leaves none behind."""
    if not hasattr(parameter, "ds_shape"):
        return parameter
    return nn.Parameter(parameter.new_zeros(()).expand(tuple(parameter.ds_shape)))


@torch.no_grad()
def materialize_cut(
    model: PreTrainedModel, config: dict[str, Any], weights: Reader, device: torch.device
) -> None:
    """For ZeRO-3: give a model on the meta device its weights, cut over the ranks at once.

    Collective. Rank 0 reads; every rank holds its own part of the model and one whole parameter
    at most. The optimizer is made afterwards, for the parameters are new.
    """
    deepspeed = import_deepspeed(device)
    parameters = sum(p.numel() for p in model.parameters())
    on_every_rank(lambda: check_nvme(config, parameters))
    with off_standard_output():
        scatter = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=config)
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in made:  # tied ones stay one
                empty = torch.empty_like(old, device=device)
                made[id(old)] = nn.Parameter(empty, old.requires_grad)
                if dist.get_rank() == 0:
                    fill(made[id(old)], weights, f"{prefix}{name}")
                if config["bf16"]["enabled"]:  # DeepSpeed casts none that is cut already
                    made[id(old)].data = made[id(old)].data.to(torch.bfloat16)
                scatter._convert_to_zero_parameters([made[id(old)]])
            setattr(module, name, made[id(old)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
                fill(module._buffers[name], weights, f"{prefix}{name}")


def check_nvme(config: dict[str, Any], parameters: int) -> None:
    """Refuse an offload to NVMe that would fail at the first swap: no folder, too little space
    in it for what the ranks of this machine keep there, or no libaio.

    A parameter takes 16 bytes with its optimizer (weight, two moments, gradient; float32), and
    4 of its own.
    """
    zero, ranks = config["zero_optimization"], dist.get_world_size()
    here = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    for block, key, size in (
        ("offload_optimizer", "memory.offload.optimizer", 16),
        ("offload_param", "memory.offload.parameters", 4),
    ):
        asked = zero.get(block, {})
        if asked.get("device") != "nvme":
            continue
        path, needed = Path(asked["nvme_path"]), size * parameters * here // ranks
        if not path.is_dir() or not os.access(path, os.W_OK):
            raise RequestError(
                f"{key}: nvme: {path} is not a folder that can be written to; make it on the "
                "NVMe device, or offload to cpu"
            )
        if (free := shutil.disk_usage(path).free) < needed:
            raise RequestError(
                f"{key}: nvme: {path} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB "
                "are needed; free some, or offload to cpu"
            )
        if not _has_libaio():
            raise RequestError(
                f"{key}: nvme: DeepSpeed reads and writes with libaio, which is missing; run "
                "apt-get install libaio-dev (and g++), or offload to cpu"
            )


def _has_libaio() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-untyped]

    return bool(AsyncIOBuilder().is_compatible(verbose=False))
