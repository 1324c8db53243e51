"""Layers of LoRA (Hu et al. 2021, arXiv:2106.09685) and its kin, by peft, and of (IA)³ (Liu et
al. 2022, arXiv:2205.05638): which modules of a model they go around, and put there in place.

DoRA: Liu et al. 2024, arXiv:2402.09353. rsLoRA: Kalajdzievski 2023, arXiv:2312.03732.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rostra.config.tuning import ALL, AdapterTable
from rostra.errors import RequestError

TRAINED = "default"  # what peft calls the adapter that trains; of others `frozen_name`


def frozen_name(index: int) -> str:
    return f"frozen_{index}"


def peft() -> Any:
    """The package, loaded when it is needed: that takes seconds.

    Raises RequestError where it is not installed.
    """
    try:
        import peft as package
    except ImportError as error:
        raise RequestError(
            "adapter: the package peft is not installed; `pip install rostra[tune]` brings it"
        ) from error
    return package


def lora_config(section: AdapterTable, model: PreTrainedModel) -> Any:
    """The LoraConfig of a section of kind lora."""
    return peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=_targets(section.targets or ALL, model),
        modules_to_save=list(section.modules_to_save) or None,
        use_rslora=section.rslora,
        use_dora=section.dora,
        fan_in_fan_out=_transposed(model),
    )


def ia3_config(section: AdapterTable, model: PreTrainedModel) -> Any:
    """The IA3Config of a section of kind ia3; which modules, where none are named, peft knows
    of the family."""
    targets, family = section.targets, model.config.get_text_config().model_type
    known = peft().utils.constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
    if targets is None and family not in known:
        raise RequestError(
            f"adapter.targets: which modules ia3 scales in a {family} is not known; name them: "
            "the projections to keys and values, and the last of the MLP"
        )
    named = _targets(tuple(known[family]) if targets is None else targets, model)
    if isinstance(named, str):
        named = sorted(targeted(named, model, pattern=True))
    return peft().IA3Config(
        task_type="CAUSAL_LM",
        target_modules=named,
        feedforward_modules=[name for name in named if _after_activation(name, model)],
        modules_to_save=list(section.modules_to_save) or None,
        fan_in_fan_out=_transposed(model),
    )


def _transposed(model: PreTrainedModel) -> bool:
    """Whether layers hold their matrices as [in, out], as GPT-2's do."""
    return any(isinstance(module, Conv1D) for module in model.modules())


def _targets(asked: str | tuple[str, ...], model: PreTrainedModel) -> list[str] | str:
    """What was `asked` for, as peft takes it; of all-linear, the last parts of the names."""
    if isinstance(asked, str) and asked != ALL:
        return asked
    names = {asked} if isinstance(asked, str) else {*asked}
    every = {name.rpartition(".")[2] for name in linear(model)} if ALL in names else set()
    return sorted((names - {ALL}) | every)


def linear(model: PreTrainedModel) -> list[str]:
    """The names of all linear layers but the head."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]


def targeted(target: str, model: nn.Module, pattern: bool) -> dict[str, nn.Module]:
    """The modules that a target names: by the last parts of their names, or by a `pattern` of
    whole names.

    Raises: RequestError for what is no pattern.
    """
    if not pattern:
        return named_modules(model, target)
    try:
        return {name: m for name, m in model.named_modules() if re.fullmatch(target, name)}
    except re.error as error:
        raise RequestError(f"adapter.targets: {target!r} is no pattern: {error}") from error


def named_modules(model: nn.Module, part: str) -> dict[str, nn.Module]:
    """The modules whose name is `part`, or ends with it after a dot."""
    return {name: m for name, m in model.named_modules() if f".{name}".endswith(f".{part}")}


def _after_activation(target: str, model: PreTrainedModel) -> bool:
    """Whether (IA)³ scales what enters these modules: what an MLP's last layer reads."""
    hidden = model.get_input_embeddings().weight.shape[1]
    within = [
        f".{name}."
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention")
    ]
    found = named_modules(model, target)
    if any(f".{name}.".startswith(attention) for name in found for attention in within):
        return False
    return all(features(module)[1] == hidden for module in found.values())


def features(module: nn.Module) -> tuple[int, int]:
    """How many numbers a linear layer takes and gives."""
    if isinstance(module, Conv1D):
        rows, columns = module.weight.shape
        return rows, columns
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features


def check_targets(config: Any, model: PreTrainedModel, whence: str) -> None:
    """Refuse targets that name nothing, or what no adapter of this kind goes around; `whence`
    says where they are written. LoRA goes around linear layers, the head among them, and around
    embeddings; (IA)³ around linear layers of the body, and so does DoRA: it divides by the
    lengths of rows, and those of tokens that nobody uses may be zero."""
    targets = config.target_modules
    body = config.peft_type.value != "LORA" or config.use_dora
    head = id(model.get_output_embeddings())
    pattern = isinstance(targets, str)
    for target in [targets] if pattern else sorted(targets):
        found = targeted(target, model, pattern)
        if not found:
            what = "matches the whole name of" if pattern else "names"
            raise RequestError(
                f"{whence}: {target!r} {what} no module of a {type(model).__name__}; its linear "
                f"layers are {', '.join(_targets(ALL, model))}"
            )
        for name, module in found.items():
            end = id(module) == head or isinstance(module, nn.Embedding)
            if (end and body) or not (end or isinstance(module, (nn.Linear, Conv1D))):
                what = "linear layer of the model's body" if body else "linear layer or embedding"
                raise RequestError(
                    f"{whence}: {name} is no {what}; leave it out"
                    + (", or train it whole by adapter.modules_to_save" * end)
                )


def check_saved(config: Any, path: str) -> None:
    """Refuse a saved adapter that does more than what is done here."""
    kinds = ("LORA", "IA3", "PROMPT_TUNING", "PREFIX_TUNING")
    kind = config.peft_type.value
    odd: list[str] = [] if kind in kinds else [f"peft_type {kind}"]
    odd += [key for key in _UNKNOWN if getattr(config, key, None)]
    if getattr(config, "bias", "none") != "none":
        odd.append("bias")
    begins = getattr(config, "init_lora_weights", True)
    if isinstance(begins, str) and begins not in ("gaussian", "eva", "orthogonal"):
        odd.append(f"init_lora_weights {begins} (which changes the base)")
    if odd:
        raise RequestError(f"{path}: an adapter with {', '.join(odd)}, which is not known here")


# What some saved configs hold, and would change what is computed or trained.
_UNKNOWN = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "prefix_projection",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)


def inject(model: PreTrainedModel, config: Any, name: str, drops: bool) -> None:
    """Put the layers of `config` into `model`, in place, under `name`; on the meta device
    without memory. Without dropout, unless it `drops`."""
    config = copy.copy(config)
    if not drops:
        config.lora_dropout = 0.0
    config.inference_mode = False
    config.modules_to_save = None  # these train in place, without a copy beside them
    on_meta = next(model.parameters()).is_meta
    with warnings.catch_warnings():
        # of what is right: a second adapter, and a fan_in_fan_out that fits no layer of a target
        warnings.simplefilter("ignore", UserWarning)
        peft().inject_adapter_in_model(config, model, name, low_cpu_mem_usage=on_meta)
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            # Autocast casts what enters a product; cast to float32 before, it would be kept twice.
            module.cast_input_dtype_enabled = False


def activate(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Have all these adapters act; peft lets one alone, unless told."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter(list(names))
