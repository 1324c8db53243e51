"""Initial values of adapters, by name of parameter, and of the model beneath them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rostra.adapt.files import Adapter
from rostra.adapt.prefix import PREFIX
from rostra.adapt.prompt import PROMPT
from rostra.pieces import Reader, cut

_ROWS = 1024  # of a base weight, read at a time
_SPREAD = 0.02  # of a prefix's first keys and values: small, so that it begins as hardly anything

Make = Callable[[], Tensor]


class AdapterWeights:
    """A Reader of what adapters begin as, each tensor drawn or read when it is asked for.

    Values depend on the seed and the parameter's name alone, so every rank of every layout
    draws the same. Host memory: the last tensor that was read.
    """

    def __init__(self, made: dict[str, tuple[tuple[int, ...], Make]]) -> None:
        self._made = made
        self._last: tuple[str, Tensor] | None = None

    def names(self) -> Iterable[str]:
        return list(self._made)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._made[name][0]

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # its memory first
            self._last = (name, self._made[name][1]().float())
        return cut(self._last[1], offset, size)


class AdaptedWeights:
    """What a model with adapters is filled from: `adapter` for what these brought, and `base`
    for all else, by the names it has there: a Reader.

    Made of the model before it is cut into stages.
    """

    def __init__(self, model: PreTrainedModel, base: Reader, adapter: Reader) -> None:
        known = set(adapter.names())
        self._homes: dict[str, tuple[Reader, str]] = {}
        for name, _ in (*model.named_parameters(), *model.named_buffers()):
            own = name in known
            self._homes[name] = (adapter, name) if own else (base, base_name(name))

    def names(self) -> Iterable[str]:
        return list(self._homes)

    def shape(self, name: str) -> tuple[int, ...]:
        reader, there = self._homes[name]
        return reader.shape(there)

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        reader, there = self._homes[name]
        return reader.read(there, offset, size)


def base_name(name: str) -> str:
    """The name, in the bare model, of a parameter that an adapter goes around."""
    return name.replace(".base_layer.", ".")


def adapter_weights(
    model: PreTrainedModel, adapter: Adapter, seed: int, base: Reader, prompt: Sequence[int] = ()
) -> AdapterWeights:
    """The first values of everything that `add_adapter` brought into `model`.

    A saved adapter's are its own. LoRA's A is uniform within 1/sqrt(inputs) and B zero, so that
    it begins as nothing. Around an embedding it is A, a column for each token, that is zero, and
    B that is drawn, uniform within 1/sqrt(outputs): as peft draws it, with a deviation of 1, an
    update soon drowns what a token was (docs/lab-notes.md). DoRA's magnitudes are the norms of
    the base's rows; (IA)³ scales by 1; a prompt is the embeddings of the tokens `prompt`, again
    and again, or of tokens that are drawn (Lester et al. 2021, section 3.2); a prefix is small
    and drawn.

    `base` has the bare model's weights in a float type, also of layers that are quantised.
    """
    made: dict[str, tuple[tuple[int, ...], Make]] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        for owner, saved in adapter.owners():
            if saved is not None and name in saved.base_keys:
                made[name] = (shape, partial(saved.whole, saved.base_keys[name]))
            if not adapter.keys_of(name, owner):
                continue
            if saved is not None:
                made[name] = (shape, partial(saved.parameter, name, shape, owner))
            elif (make := _first(name, shape, model, seed, base, prompt)) is not None:
                made[name] = (shape, make)
    return AdapterWeights(made)


def _first(
    name: str,
    shape: tuple[int, ...],
    model: PreTrainedModel,
    seed: int,
    base: Reader,
    prompt: Sequence[int],
) -> Make | None:
    """How a parameter of a new adapter begins; None for one of the base's own."""
    layer = name.partition(".lora_magnitude_vector.")[0]

    def norms() -> Tensor:
        transposed = bool(model.get_submodule(layer).fan_in_fan_out)
        return _norms(base, base_name(f"{layer}.weight"), transposed)

    begins: dict[str, Make] = {
        "lora_A": lambda: _within(name, shape, seed, 1 / math.sqrt(shape[1])),
        "lora_B": lambda: torch.zeros(shape),
        "lora_embedding_A": lambda: torch.zeros(shape),
        "lora_embedding_B": lambda: _within(name, shape, seed, 1 / math.sqrt(shape[0])),
        "lora_magnitude_vector": norms,
        "ia3_l": lambda: torch.ones(shape),
        PROMPT: lambda: _embeddings(model, base, name, seed, prompt),
        PREFIX: lambda: torch.randn(shape, generator=_generator(name, seed)).mul_(_SPREAD),
    }
    parts = name.split(".")[-3:]
    return next((make for kind, make in begins.items() if kind in parts), None)


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def _within(name: str, shape: tuple[int, ...], seed: int, bound: float) -> Tensor:
    """Uniform from -bound to bound."""
    return torch.rand(shape, generator=_generator(name, seed)).sub_(0.5).mul_(2 * bound)


def _norms(base: Reader, name: str, transposed: bool) -> Tensor:
    """The Euclidean norm of what each output is made with: of rows [out, in], or of columns."""
    rows, columns = base.shape(name)
    squares = torch.zeros(columns if transposed else rows)
    for start in range(0, rows, _ROWS):
        size = min(_ROWS, rows - start)
        part = base.read(name, (start, 0), (size, columns)).float().square_()
        if transposed:
            squares += part.sum(0)
        else:
            squares[start : start + size] = part.sum(1)
    return squares.sqrt_()


def _embeddings(
    model: PreTrainedModel, base: Reader, name: str, seed: int, prompt: Sequence[int]
) -> Tensor:
    """A prompt's first vectors: what the model's embedding gives for tokens."""
    count = model.get_parameter(name).shape[0]
    embedding = model.get_input_embeddings()
    table = name.removesuffix(f"{PROMPT}.weight") + "weight"
    rows, hidden = base.shape(table)
    tokens = ([*prompt] * -(-count // len(prompt)))[:count] if prompt else []
    if not tokens:
        tokens = torch.randint(rows, (count,), generator=_generator(name, seed)).tolist()
    found = [base.read(table, (token, 0), (1, hidden)).float() for token in tokens]
    return torch.cat(found) * float(getattr(embedding, "scalar_embed_scale", 1.0))
