"""Adapters on disk, as peft saves them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rostra.adapt.lora import TRAINED, check_saved, frozen_name, peft
from rostra.adapt.prefix import PREFIX, pack_prefix, unpack_prefix
from rostra.adapt.prompt import PROMPT
from rostra.config.tuning import AdapterTable
from rostra.errors import RequestError
from rostra.pieces import PieceReader, index_file, read_whole

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
VIRTUAL = "prompt_embeddings"  # peft's one tensor of prompt and prefix tuning
_KINDS = {"lora": "LORA", "ia3": "IA3", "prompt": "PROMPT_TUNING", "prefix": "PREFIX_TUNING"}


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in a folder: peft's config of it, and its tensors by their keys there."""

    path: str
    config: Any
    tensors: PieceReader

    @property
    def kind(self) -> str:
        """As in `adapter.kind`."""
        kind = self.config.peft_type.value
        return next(ours for ours, theirs in _KINDS.items() if theirs == kind)

    @property
    def base_keys(self) -> dict[str, str]:
        """The base's own parameters that the file holds, by name in a model with this adapter:
        peft saves an embedding or a head that LoRA goes around with it."""
        keys = [key for key in self.tensors.names() if ".base_layer." in key]
        return {key.removeprefix("base_model.model."): key for key in keys}

    def whole(self, key: str) -> Tensor:
        return read_whole(self.tensors, key)

    def parameter(self, name: str, shape: tuple[int, ...], adapter: str) -> Tensor:
        """The value of the parameter `name`, of `shape`, of a model in which this adapter is
        called `adapter`."""
        key = file_key(name, adapter)
        if key == VIRTUAL and self.kind == "prefix":
            return unpack_prefix(self.whole(key), _layer(name), shape)
        return self.whole(key)


@dataclass(frozen=True)
class Adapter:
    """What `add_adapter` made of a model."""

    kind: str  # as in `adapter.kind`
    config: Any  # peft's, as it is saved
    keys: Mapping[str, tuple[str, ...]]  # what trains, by name, and where it is in peft's file
    saved: SavedAdapter | None = None  # that it goes on with
    frozen: tuple[SavedAdapter, ...] = ()

    def owners(self) -> list[tuple[str, SavedAdapter | None]]:
        """What adapters are called in the names of parameters, and where they come from."""
        frozen = [(frozen_name(i), saved) for i, saved in enumerate(self.frozen)]
        return [(TRAINED, self.saved), *frozen]

    def keys_of(self, name: str, owner: str) -> tuple[str, ...]:
        """Where the parameter `name` is in the file of `owner`; empty when it is not of it."""
        if owner == TRAINED:
            return self.keys.get(name, ())
        return (file_key(name, owner),) if f".{owner}." in f".{name}." else ()

    @property
    def virtual_tokens(self) -> int:
        """Placeholders that stand before each example of a sample: see `prompt.py`."""
        return self.config.num_virtual_tokens if self.kind in ("prompt", "prefix") else 0


def virtual_tokens(section: AdapterTable) -> int:
    """Placeholders that stand before each example, under the section's adapter."""
    if section.kind not in ("prompt", "prefix"):
        return 0
    if section.pretrained is None:
        return section.virtual_tokens
    saved = read_adapter(section.pretrained, "adapter.pretrained")
    return int(saved.config.num_virtual_tokens)


def read_adapter(path: str, key: str) -> SavedAdapter:
    """The adapter in a local folder or of a hub id, which the config has under `key`.

    Raises: RequestError when there is none, or one of a kind that is not known here.
    """
    folder = Path(path)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(path, allow_patterns=[CONFIG, WEIGHTS]))
        if (folder / "adapter_model.bin").exists() and not (folder / WEIGHTS).exists():
            raise RequestError(
                f"{key}: {path}: its weights are a pickle (.bin), which may run code when loaded; "
                f"convert them where you trust them: load with peft, and save with save_pretrained"
            )
        config = peft().PeftConfig.from_pretrained(str(folder))
        tensors = PieceReader(folder, index_file(folder / WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0]
        raise RequestError(
            f"{key}: {path}: cannot read this adapter: {first} (give a folder that holds "
            f"{CONFIG} and {WEIGHTS}, or a hub id)"
        ) from error
    check_saved(config, f"{key}: {path}")
    return SavedAdapter(path, config, tensors)


def file_key(name: str, adapter: str) -> str:
    """The key in peft's file of the parameter `name`, of the adapter called `adapter`."""
    if name.endswith((f".{PROMPT}.weight", f".{PREFIX}.weight")):
        return VIRTUAL
    parts = [part for part in name.split(".") if part != adapter]
    if parts[-2:] == ["lora_magnitude_vector", "weight"]:
        del parts[-1]  # peft's name of it from when it was no module
    return ".".join(["base_model", "model", *parts])


def save_adapter(
    folder: Path, tensors: Mapping[str, Tensor], adapter: Adapter, base: str | None
) -> None:
    """Write `adapter` as peft does, into `folder`, which the caller commits.

    `tensors` are the whole values of what trains, by name of parameter; `base` is the path or
    hub id of the model that it goes with. Raises KeyError when a parameter is missing.
    """
    written: dict[str, Tensor] = {}
    layers: dict[int, Tensor] = {}
    for name, keys in adapter.keys.items():
        value = tensors[name].detach().cpu().contiguous()
        if adapter.kind == "prefix":
            layers[_layer(name)] = value
        else:
            written |= {key: value.clone() for key in keys}  # the file takes no shared memory
    if adapter.saved is not None:  # it was learned beside these
        written |= {key: adapter.saved.whole(key) for key in adapter.saved.base_keys.values()}
    if layers:
        written[VIRTUAL] = pack_prefix(layers)
    save_file(written, folder / WEIGHTS, metadata={"format": "pt"})
    values = adapter.config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    plain = {key: sorted(x) if isinstance(x, set) else x for key, x in values.items()}
    (folder / CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True))


def _layer(name: str) -> int:
    """The number of the layer in the name of a parameter."""
    return next(int(part) for part in name.split(".") if part.isdigit())
