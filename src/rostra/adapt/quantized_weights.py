"""Weights of quantised layers: made while reading, kept on disk for the next start, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rostra.adapt.quantized import QuantizedLinear
from rostra.adapt.quantized_format import Format, constant_code, dequantize, in_order, quantize
from rostra.pieces import INDEX, PieceReader, Reader, cut, index_file, read_whole
from rostra.store import MANIFEST, broken_files, commit_folder, read_manifest, sweep, write_json
from rostra.workers import on_first_rank

_FILE = 1 << 29  # bytes of stored tensors that are in memory until a file is written


class QuantizedWeights:
    """What a model after `quantize_model` is filled from: a Reader over that of its weights.

    A weight is quantised when one of its stored tensors is asked for, some rows at a time, and
    always as a whole, so that every rank has the same bytes of it. Host memory: the stored
    tensors of the last one (so read in the order of the model), and what `weights` needs for
    a few million numbers.

    `model` is as `quantize_model` left it, before adapters give its modules other names.
    """

    def __init__(self, weights: Reader, model: nn.Module) -> None:
        self.weights = weights
        self.forms = quantized_forms(model)
        self._homes = {
            f"{name}.{key}": (name, key) for name, f in self.forms.items() for key in f.tensors()
        }
        self._last: tuple[str, dict[str, Tensor]] | None = None
        self._code = constant_code()

    def names(self) -> Iterable[str]:
        plain = {f"{name}.weight" for name in self.forms}
        return [*(name for name in self.weights.names() if name not in plain), *self._homes]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._homes:
            return self.weights.shape(name)
        layer, key = self._homes[name]
        return self.forms[layer].tensors()[key][0]

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if name not in self._homes:
            return self.weights.read(name, offset, size)
        layer, key = self._homes[name]
        if key == "code":  # buffers are read after all parameters
            return cut(self._code, offset, size)
        if self._last is None or self._last[0] != layer:
            self._last = None  # its memory first
            self._last = (layer, self.quantized(layer))
        return cut(self._last[1][key], offset, size)

    def quantized(self, layer: str) -> dict[str, Tensor]:
        """The stored tensors of a layer, made anew."""
        form = self.forms[layer]

        def rows(start: int, stop: int) -> Tensor:
            return self.weights.read(f"{layer}.weight", (start, 0), (stop - start, form.shape[1]))

        return quantize(form, rows)


class DequantizedWeights:
    """A Reader of plain weights in `dtype` over one of quantised ones: what a base that was
    trained quantised really computes with, for merging into it."""

    def __init__(
        self, stored: Reader, model: nn.Module, dtype: torch.dtype = torch.float32
    ) -> None:
        self._stored, self._dtype = stored, dtype
        self._forms = {f"{name}.weight": form for name, form in quantized_forms(model).items()}

    def names(self) -> Iterable[str]:
        parts = {
            f"{name.removesuffix('weight')}{key}"
            for name, form in self._forms.items()
            for key in form.tensors()
        }
        return [*(name for name in self._stored.names() if name not in parts), *self._forms]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._forms[name].shape if name in self._forms else self._stored.shape(name)

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        form = self._forms.get(name)
        if form is None:
            return self._stored.read(name, offset, size)
        prefix = name.removesuffix("weight")
        parts = {key: read_whole(self._stored, f"{prefix}{key}") for key in form.tensors()}
        return cut(dequantize(form.kind, in_order(form, parts), self._dtype), offset, size)


def quantized_forms(model: nn.Module) -> dict[str, Format]:
    """The names of a model's quantised layers, and how each is stored."""
    named = model.named_modules()
    return {name: m.form for name, m in named if isinstance(m, QuantizedLinear)}


class CachedWeights:
    """`weights`, with the stored tensors read from `folder` in slices: a Reader."""

    def __init__(self, folder: Path, weights: QuantizedWeights) -> None:
        self._files, self._weights = PieceReader(folder), weights
        self._stored = set(self._files.names())

    def names(self) -> Iterable[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        reader: Reader = self._files if name in self._stored else self._weights
        return reader.read(name, offset, size)


def cached_weights(weights: QuantizedWeights, base: Mapping[str, Any], root: Path) -> Reader:
    """`weights`, with its stored tensors on disk under `root` from the first start on.

    Collective. Rank 0 quantises everything once and writes it, or checks the sums of what is
    there and writes it anew when one is wrong; then each rank reads what it holds. A rank on a
    host that does not see `root` quantises for itself, which gives the same bytes.

    `base` identifies the weights, in JSON: see `folder_identity`.
    Raises: RequestError when the disk is full.
    """
    folder = root / "quantized" / _key(weights.forms, base)
    on_first_rank(lambda: _ensure(folder, weights))
    return CachedWeights(folder, weights) if (folder / MANIFEST).exists() else weights


def folder_identity(folder: Path) -> dict[str, Any]:
    """What tells the weights of a model's folder from others without reading them: the hub's own
    hashes in its cache, elsewhere path, size and time of change of each file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        real = path.resolve()
        if real.parent.name == "blobs":  # in the hub's cache, named by its hash
            found[path.name] = real.name
        else:
            state = real.stat()
            found[path.name] = [str(real), state.st_size, state.st_mtime_ns]
    return found


def _key(forms: dict[str, Format], base: Mapping[str, Any]) -> str:
    form = next(iter(forms.values()))
    known = {
        "base": dict(base),
        "tensors": {name: [f.kind, f.double, f.shape] for name, f in forms.items()},
        "versions": [1, version("bitsandbytes")],
    }
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    double = "-double" if form.double else ""
    return f"{form.kind}{double}-{digest[:16]}"


def _ensure(folder: Path, weights: QuantizedWeights) -> None:
    manifest = read_manifest(folder)
    if manifest is not None and not broken_files(folder, manifest):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    with commit_folder(folder) as aside:
        index: dict[str, Any] = {}
        waiting: dict[str, Tensor] = {}
        for count, layer in enumerate(weights.forms, 1):
            made = weights.quantized(layer)
            waiting |= {f"{layer}.{key}": tensor for key, tensor in made.items()}
            size = sum(tensor.nbytes for tensor in waiting.values())
            if size >= _FILE or count == len(weights.forms):
                path = aside / f"{count:05}.safetensors"
                save_file(waiting, path)
                index |= index_file(path)
                waiting = {}
        write_json(aside / INDEX, index)
