"""Adapters on a model: what the section `adapter` says, put in place before weights are there."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from rostra.adapt.dropout import replace_dropout
from rostra.adapt.files import Adapter, SavedAdapter, file_key, read_adapter
from rostra.adapt.lora import (
    TRAINED,
    activate,
    check_targets,
    frozen_name,
    ia3_config,
    inject,
    linear,
    lora_config,
    named_modules,
    peft,
    targeted,
)
from rostra.adapt.prefix import PREFIX, add_prefix, prefix_shape
from rostra.adapt.prompt import PROMPT, add_prompt
from rostra.config.tuning import AdapterTable
from rostra.errors import RequestError

_LAYERS = ("lora", "ia3")  # kinds that go around linear layers


def add_adapter(
    model: PreTrainedModel, section: AdapterTable, grown: tuple[str, ...] = ()
) -> Adapter | None:
    """Freeze `model` and put the adapters of `section` into it; None where there are none.

    In place, before the model is cut and before a kernel of attention is chosen; meant for a
    model on the meta device (`AdaptedWeights` fills it), whose quantised layers are there
    already. Names of parameters are peft's. `grown` are modules that train whole in any case:
    see `grow_embeddings`.

    Raises: RequestError for targets that the model has not, and for a saved adapter that does
    not fit the section or the model.
    """
    if section.kind == "none":
        return None
    saved = None
    if section.pretrained is not None:
        saved = read_adapter(section.pretrained, "adapter.pretrained")
        _check_agreement(section, saved, model)
    frozen = tuple(read_adapter(path, "adapter.frozen") for path in section.frozen)
    _check_frozen(section, frozen)
    config = saved.config if saved is not None else _config(section, model)
    _train_whole(config, grown, section.kind)
    model.requires_grad_(False)
    _add_layers(model, section, config, frozen)
    adapter = Adapter(section.kind, config, _trained(model, config), saved, frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in adapter.keys)
    _check_tensors(model, adapter)
    return adapter


def _config(section: AdapterTable, model: PreTrainedModel) -> Any:
    """peft's config of an adapter that begins here."""
    if section.kind == "lora":
        return lora_config(section, model)
    if section.kind == "ia3":
        return ia3_config(section, model)
    layers, heads, size = prefix_shape(model.config)
    text = model.config.get_text_config()
    common = {
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": section.virtual_tokens,
        "num_layers": layers,
        "num_transformer_submodules": 1,
    }
    if section.kind == "prefix":
        return peft().PrefixTuningConfig(
            **common, token_dim=heads * size, num_attention_heads=heads
        )
    return peft().PromptTuningConfig(
        **common, token_dim=text.hidden_size, num_attention_heads=text.num_attention_heads
    )


def _train_whole(config: Any, grown: tuple[str, ...], kind: str) -> None:
    if not grown:
        return
    if kind not in _LAYERS:
        raise RequestError(
            f"adapter.kind: {kind} holds no embeddings, and those of added tokens have to be "
            "learned; use lora or ia3, or add no tokens"
        )
    config.modules_to_save = sorted({*(config.modules_to_save or ()), *grown})


def _add_layers(
    model: PreTrainedModel, section: AdapterTable, config: Any, frozen: tuple[SavedAdapter, ...]
) -> None:
    """The modules of all adapters; those in `frozen` first, as what they name is found then."""
    named = [(frozen_name(i), a.config, f"adapter.frozen: {a.path}") for i, a in enumerate(frozen)]
    if section.kind in _LAYERS:
        whence = "adapter.targets" if section.pretrained is None else "adapter.pretrained"
        named.append((TRAINED, config, whence))
    for _, one, whence in named:
        check_targets(one, model, whence)
        _check_tied(one, model, whence)
    for name, one, _ in named:
        inject(model, one, name, drops=name == TRAINED)
    activate(model, [name for name, *_ in named])
    replace_dropout(model, TRAINED)
    if section.kind == "prompt":
        add_prompt(model, config.num_virtual_tokens)
    if section.kind == "prefix":
        add_prefix(model, config.num_virtual_tokens)


def _check_tied(config: Any, model: PreTrainedModel, whence: str) -> None:
    """Refuse an adapter whose matrices around head and embedding are one another's transposes:
    here they would part while they train."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if tied and getattr(config, "ensure_weight_tying", False):
        raise RequestError(
            f"{whence}: an adapter with ensure_weight_tying, whose update of tied embeddings is "
            "shared; merge it into the model first (rostra merge), or train one without"
        )


def _trained(model: PreTrainedModel, config: Any) -> dict[str, tuple[str, ...]]:
    """What trains, in the model's order, with its keys in peft's file.

    Of tied embeddings, where one is to be saved, the other is too: peft trains a copy of each.
    """
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    whole: set[str] = set()
    for part in getattr(config, "modules_to_save", None) or ():
        found = named_modules(model, part)
        if not found:
            raise RequestError(
                f"adapter.modules_to_save: {part!r} names no module of a {type(model).__name__}"
            )
        for name, module in found.items():
            whole |= {f"{name}.{own}" for own, _ in module.named_parameters()}
    also = {name for names in tied.values() if whole & {*names} for name in names}
    if also - whole:
        modules = {name.rpartition(".")[0].rpartition(".")[2] for name in also - whole}
        config.modules_to_save = sorted({*config.modules_to_save, *modules})
    trained = {}
    for name, parameter in model.named_parameters():
        own = f".{TRAINED}." in f".{name}." or f".{name}".endswith(_VIRTUAL)
        if own or name in also:
            trained[name] = tuple(file_key(n, TRAINED) for n in tied[id(parameter)])
    if clash := next((name for name in also if ".base_layer." in name), None):
        raise RequestError(
            f"adapter.modules_to_save: {clash.replace('.base_layer', '')} is adapted too; leave "
            "its module out of modules_to_save, or of targets"
        )
    return trained


_VIRTUAL = (f".{PROMPT}.weight", f".{PREFIX}.weight")

# A key of the section, and peft's.
_SAME = {
    "rank": "r",
    "alpha": "lora_alpha",
    "rslora": "use_rslora",
    "dora": "use_dora",
    "virtual_tokens": "num_virtual_tokens",
}


def _check_agreement(section: AdapterTable, saved: SavedAdapter, model: PreTrainedModel) -> None:
    """Refuse a section that says something else than the saved adapter. Dropout may change."""
    config = saved.config
    found: dict[str, Any] = {"kind": saved.kind}
    found |= {ours: getattr(config, peft) for ours, peft in _SAME.items() if hasattr(config, peft)}
    for ours, theirs in (("targets", "target_modules"), ("modules_to_save", "modules_to_save")):
        value = getattr(config, theirs, None) or ()
        found[ours] = value if isinstance(value, str) else tuple(sorted(value))
    if section.targets and section.all_linear and not _misses(section, config, model):
        del found["targets"]
    for key in sorted(section.model_fields_set & found.keys()):
        asked = getattr(section, key)
        asked = tuple(sorted(asked)) if isinstance(asked, tuple) else asked
        if asked not in (found[key], None):
            raise RequestError(
                f"adapter.{key} = {asked}: the saved adapter {saved.path} has {found[key]}; "
                f"leave adapter.{key} out, or adapter.pretrained"
            )
    if "dropout" in section.model_fields_set:
        saved.config.lora_dropout = section.dropout


def _misses(section: AdapterTable, config: Any, model: PreTrainedModel) -> bool:
    """Whether a saved adapter leaves out a linear layer, or what is named beside all of them."""
    targets: Any = config.target_modules or ()
    pattern = isinstance(targets, str)
    found = {n for t in ([targets] if pattern else targets) for n in targeted(t, model, pattern)}
    wanted = {name for name, _ in model.named_modules() if section.aims_at(name)}
    return not found.issuperset({*linear(model), *wanted})


def _check_frozen(section: AdapterTable, frozen: tuple[SavedAdapter, ...]) -> None:
    kinds = {saved.kind for saved in frozen} | ({section.kind} & {*_LAYERS})
    for saved in frozen:
        if saved.kind not in _LAYERS or len(kinds) > 1:
            raise RequestError(
                f"adapter.frozen: {saved.path} is of kind {saved.kind}, which does not go with "
                f"{section.kind}; frozen adapters are all lora, or all ia3, as what trains if "
                "that is one of the two"
            )
        if getattr(saved.config, "modules_to_save", None):
            raise RequestError(
                f"adapter.frozen: {saved.path} holds whole modules "
                f"({', '.join(sorted(saved.config.modules_to_save))}), which stand in the place "
                "of the model's; merge it into the model first"
            )


def _check_tensors(model: PreTrainedModel, adapter: Adapter) -> None:
    """Refuse saved adapters whose tensors are not those that the model asks for, and such as
    bring different values of the base's own."""
    base: dict[str, SavedAdapter] = {}
    for owner, saved in adapter.owners():
        if saved is not None:
            _check_base(saved, base)
            expected = {
                key: tuple(parameter.shape)
                for name, parameter in model.named_parameters()
                for key in adapter.keys_of(name, owner)
            }
            there = dict(model.named_parameters(remove_duplicate=False))
            for name, key in saved.base_keys.items():
                expected |= {key: tuple(there[name].shape)} if name in there else {}
            _compare(saved, expected)


def _check_base(saved: SavedAdapter, known: dict[str, SavedAdapter]) -> None:
    """`known` are those before, by the names of what they bring of the base."""
    for name, key in saved.base_keys.items():
        other = known.setdefault(name, saved)
        if other is saved:
            continue
        if not torch.equal(other.whole(other.base_keys[name]), saved.whole(key)):
            raise RequestError(
                f"{saved.path}: its {key} is not that of {other.path}; both were trained beside "
                "a base of their own: merge one into its base first (rostra merge)"
            )


def _compare(saved: SavedAdapter, expected: dict[str, tuple[int, ...]]) -> None:
    there = {name: saved.tensors.shape(name) for name in saved.tensors.names()}
    if saved.kind == "prefix":  # one tensor for all layers
        config = saved.config
        width = config.num_layers * 2 * config.token_dim
        expected = dict.fromkeys(expected, (config.num_virtual_tokens, width))
    for key in sorted({*there, *expected}):
        if there.get(key) != expected.get(key):
            here = expected.get(key)
            raise RequestError(
                f"{saved.path}: {key} has the shape {there.get(key, 'of nothing')} there, and "
                f"{here or 'no place'} in this model; was it trained beside another one?"
            )
