"""Weights without a whole model: drawn from a seed or read from a folder, part by part.

A model is first made on the meta device, where it takes no memory; each rank then fills in
the parts that it holds from a `rostra.pieces.Reader`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from rostra.errors import RequestError
from rostra.models.causal import decoder_layers, load_model
from rostra.pieces import PieceReader, Reader, Tensors, cut, fill, index_file

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


def model_on_meta(config: PretrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """A float32 model without data, on the meta device; `config` stays as it is."""
    config = copy.deepcopy(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )


def pretrained_on_meta(path: str, attention: str | None = None) -> PreTrainedModel:
    """The model of a local folder or a hub id, without its weights: see `pretrained_reader`.

    Raises: RequestError when there is no such model, or only its own code could make it.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        model = model_on_meta(config, attention)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise RequestError(
            f"{path}: cannot load this model: {first} "
            "(give a folder that holds config.json and *.safetensors, or a hub id)"
        ) from error
    with contextlib.suppress(OSError):  # where there is none, that of the config stays
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def create_model(
    config: PretrainedConfig, seed: int, attention: str | None = None
) -> PreTrainedModel:
    """A model with random float32 weights on the CPU that depend on `seed` alone: those of
    `SeededWeights`."""
    model = model_on_meta(config, attention)
    model.to_empty(device="cpu")
    model.tie_weights()  # each of the tied ones has memory of its own now
    weights = SeededWeights(config, seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        fill(tensor, weights, name)
    return model


@dataclass(frozen=True)
class _Unit:
    """A part of a model that is initialised at once: a decoder layer, another module that
    holds none, or (`alone`) what a module around the layers holds beside its children."""

    name: str
    module: nn.Module
    owner: PreTrainedModel  # whose way of initialising is used
    alone: bool

    def names(self) -> list[str]:
        found = (self.module.named_parameters, self.module.named_buffers)
        return [name for f in found for name, _ in f(self.name, recurse=not self.alone)]


def _units(model: PreTrainedModel) -> Iterator[_Unit]:
    layers = decoder_layers(model)
    path = next(name for name, module in model.named_modules() if module is layers)
    dots = [index for index, letter in enumerate(path) if letter == "."]
    around = {"", path, *(path[:dot] for dot in dots)}
    for name, module in model.named_modules():
        if name in around or name.rpartition(".")[0] in around:
            yield _Unit(name, module, _owner(model, name), name in around)


def _owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost model that `name` is in: models may hold models."""
    while not isinstance(owner := model.get_submodule(name), PreTrainedModel):
        name = name.rpartition(".")[0]
    return owner


def _make(unit: _Unit, seed: int, parameters: bool) -> dict[str, Tensor]:
    """Initial values of the unit's buffers and, if asked for, its parameters, by name."""
    children = unit.module.children() if unit.alone else ()
    module = copy.deepcopy(unit.module, {id(child): child for child in children})
    for part in [module] if unit.alone else module.modules():
        for name, buffer in [*part.named_buffers(recurse=False)]:
            setattr(part, name, _unset(buffer))
        for name, parameter in [*part.named_parameters(recurse=False)] if parameters else ():
            setattr(part, name, nn.Parameter(_unset(parameter), requires_grad=False))
    digest = hashlib.sha256(f"{seed}/{unit.name}".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        _initialize(module, unit.owner, unit.alone)
    found = dict(module.named_buffers(unit.name, recurse=not unit.alone))
    if parameters:
        found |= dict(module.named_parameters(unit.name, recurse=not unit.alone))
    for name, value in found.items():
        if value.is_floating_point() and value.isnan().any():
            raise RequestError(
                f"{type(unit.owner).__name__}: transformers does not say how {name} begins, so "
                "this model cannot be trained from scratch; give model.pretrained"
            )
    return {name: value.detach() for name, value in found.items()}


def _unset(tensor: Tensor) -> Tensor:
    """On the CPU, with values that no initialisation gives."""
    unknown = float("nan") if tensor.is_floating_point() else 0
    return torch.full_like(tensor, unknown, device="cpu", requires_grad=False)


def _initialize(module: nn.Module, owner: PreTrainedModel, alone: bool = False) -> None:
    """As `PreTrainedModel.initialize_weights` goes: children first, models in models by
    their own way. What is on the meta device stays there."""
    for child in () if alone else module.children():
        _initialize(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)


def initial_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """All buffers of a model (on the meta device) as they are before training, on the CPU,
    those included that are not saved: rotary frequencies, scales of embeddings."""
    units = [unit for unit in _units(model) if any(True for _ in unit.module.buffers())]
    return {name: value for unit in units for name, value in _make(unit, 0, False).items()}


class SeededWeights:
    """The initial weights of a model from scratch, the same whatever the layout: a Reader.

    They are drawn one decoder layer, or one module outside of the layers, at a time, each
    from the seed and its name, by the model's own initialisation. Host memory: one of these,
    the last that was read from (so read in the order of the model), and the part asked for.
    Every rank draws the whole of each layer that it holds a part of.

    Raises: RequestError (on reading) for a model whose initialisation is not complete.
    """

    def __init__(self, config: PretrainedConfig, seed: int) -> None:
        model = model_on_meta(config)
        self._seed = seed
        self._buffers = initial_buffers(model)
        self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self._shapes |= {n: tuple(b.shape) for n, b in self._buffers.items()}
        self._unit = {name: unit for unit in _units(model) for name in unit.names()}
        self._made: tuple[str, dict[str, Tensor]] | None = None

    def names(self) -> Iterable[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if name in self._buffers:
            return cut(self._buffers[name], offset, size)
        unit = self._unit[name]
        if self._made is None or self._made[0] != unit.name:
            self._made = None  # its memory first
            self._made = (unit.name, _make(unit, self._seed, parameters=True))
        return cut(self._made[1][name], offset, size)


class FolderWeights:
    """The weights of a pretrained model's folder, under the model's names: a Reader.

    Only what is asked for is read from its (memory-mapped) safetensors files. Buffers that
    are not saved are computed.

    Raises: LookupError when the names or shapes on disk are not the model's, so that
    transformers must load it as a whole; RequestError when weights that the config ties differ.
    """

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        model = model_on_meta(config)
        stored = _stored_index(folder)
        buffers = initial_buffers(model)
        names = _names_on_disk(model, stored)
        saved = set(model.state_dict())
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            on_disk = names.get(name, [])
            if not on_disk and (name in saved or name not in buffers):
                raise LookupError(f"{folder}: has no {name}")
            if any(tuple(stored[key]["shape"]) != tuple(value.shape) for key in on_disk):
                raise LookupError(f"{folder}: {name} has another shape")
        _check_conversions(model, folder, stored)
        index = {name: stored[keys[0]] for name, keys in names.items() if keys}
        files = PieceReader(folder, index)
        _check_ties(folder, PieceReader(folder, stored), names)
        computed = Tensors({n: b for n, b in buffers.items() if n not in index})
        self._readers: dict[str, Reader] = dict.fromkeys(computed.names(), computed)
        self._readers |= dict.fromkeys(index, files)

    def names(self) -> Iterable[str]:
        return list(self._readers)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._readers[name].shape(name)

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return self._readers[name].read(name, offset, size)


def _stored_index(folder: Path) -> dict[str, Any]:
    """The tensors of a model's folder, in one file or several."""
    try:
        if (folder / WEIGHTS).exists():
            return index_file(folder / WEIGHTS)
        files = json.loads((folder / WEIGHTS_INDEX).read_text())["weight_map"].values()
        stored = [index_file(folder / file) for file in sorted(set(files))]
        return {key: entry for file in stored for key, entry in file.items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise LookupError(f"{folder}: {error}") from error


def _names_on_disk(model: PreTrainedModel, stored: dict[str, Any]) -> dict[str, list[str]]:
    """For each parameter and buffer, the keys under which it may be on disk and is: its name,
    those of the weights tied to it, each also with or without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    tied: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        tied.setdefault(id(value), []).append(name)
    found = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        same = [name, *(x for x in tied.get(id(value), []) if x != name)]
        keys = [k for x in same for k in (x, x.removeprefix(prefix), prefix + x) if k in stored]
        found[name] = list(dict.fromkeys(keys))
    return found


def _check_conversions(model: PreTrainedModel, folder: Path, stored: dict[str, Any]) -> None:
    """Raises LookupError when transformers would change values and not only names."""
    if getattr(model.config, "quantization_config", None) is not None:
        raise LookupError(f"{folder}: its weights are quantised")
    for change in get_model_conversion_mapping(model):
        if isinstance(change, WeightConverter):
            for pattern in change.source_patterns:
                if key := next((key for key in stored if re.search(pattern, key)), None):
                    raise LookupError(f"{folder}: transformers converts {key} on loading")


def _check_ties(folder: Path, files: PieceReader, names: dict[str, list[str]]) -> None:
    """Tied weights that are stored twice must be equal: their first rows are compared."""
    for first, *others in (keys for keys in names.values() if len(keys) > 1):
        shape = files.shape(first)
        rows = (min(16, shape[0]), *shape[1:])
        for other in others:
            one, two = (files.read(key, (0,) * len(shape), rows) for key in (first, other))
            if not torch.equal(one, two):
                raise RequestError(
                    f"{folder}: its config ties {first} and {other}, but they differ in its "
                    "weights; set tie_word_embeddings to false in its config.json"
                )


def pretrained_reader(path: str, config: PretrainedConfig, notice: Callable[[str], None]) -> Reader:
    """The weights of a local folder or a hub id, under the model's names.

    Host memory: what is asked for at a time, where the folder's names are the model's.
    Otherwise (some families' weights are converted on loading, fused experts say) each rank
    loads the whole model into host memory in float32, and `notice` is told so.

    Raises: RequestError as `load_model`.
    """
    try:
        return FolderWeights(local_folder(path), config)
    except LookupError as error:
        model = load_model(path)
        notice(f"every rank loads the whole model into its host's memory first: {error.args[0]}")
        return Tensors(dict(model.named_parameters()) | dict(model.named_buffers()))


def local_folder(path: str) -> Path:
    """Where the weights of a local folder or a hub id are on this machine. Raises LookupError."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["model*.safetensors", WEIGHTS_INDEX]))
    except (OSError, ValueError) as error:
        raise LookupError(f"{path}: {error}") from error


def real_model(config: PretrainedConfig, weights: Reader) -> PreTrainedModel:
    """A whole model on the CPU, in the type of `weights`; buffers that are not among them are
    those of a new model."""
    model = model_on_meta(config)
    known = set(weights.names())
    own = {name: buffer for name, buffer in initial_buffers(model).items() if name not in known}
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        fill(tensor, weights if name in known else Tensors(own), name)
    return model
