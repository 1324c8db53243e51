"""A base with adapters merged into it, tensor by tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rostra.errors import RequestError
from rostra.export.updates import Update
from rostra.models import model_on_meta
from rostra.pieces import Reader, cut, read_whole

_TRANSPOSED = (Conv1D, nn.Embedding)  # weights that are [in, out]
_LAYERS = (nn.Linear, *_TRANSPOSED)


class Merged:
    """The weights of base and adapters in one: a Reader of what transformers would save.

    Each tensor is computed when it is read: what an adapter changes is float32, the rest as
    the base has it. Host memory: one tensor. `config` is the merged model's: with the rows
    that grown embeddings have, and without tied embeddings where an adapter changed only one
    side of them.

    Raises: RequestError when an adapter was not made for this base.
    """

    def __init__(self, config: PretrainedConfig, base: Reader, updates: Sequence[Update]) -> None:
        self._base, self._updates = base, updates
        model = model_on_meta(config)
        groups = _tied(model)
        self._ties = [group for group in groups if len(group) > 1]
        self._origin = {name: group[0] for group in groups for name in group}
        self._same = {name: name for name in self._origin}
        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, _LAYERS)}
        self._check_names()
        self.config = self._merged_config(config, model)
        merged = model_on_meta(self.config)
        shapes = {name: tuple(value.shape) for name, value in merged.state_dict().items()}
        self._shapes = {group[0]: shapes[group[0]] for group in _tied(merged)}
        self._check_shapes()

    def _check_names(self) -> None:
        for update in self._updates:
            for module, parts in update.modules.items():
                if module not in self._layers:
                    raise RequestError(
                        f"{update.path}: changes {module} ({', '.join(parts)}), and the base has "
                        "no such linear or embedding layer; give the base it was trained on"
                    )
            if odd := sorted(set(update.replaced) - set(self._origin)):
                raise RequestError(
                    f"{update.path}: holds {odd[0]}, which the base does not have; give the base "
                    "it was trained on (adapters of other kinds of layers cannot be merged)"
                )

    def _merged_config(self, config: PretrainedConfig, model: PreTrainedModel) -> PretrainedConfig:
        config = copy.deepcopy(config)
        for group in self._ties:
            self._settle(group, config)
        name = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
        shapes = [a.shape(k) for a in self._updates if (k := a.replaced.get(f"{name}.weight"))]
        if shapes:
            config.get_text_config().vocab_size = shapes[-1][0]
        return config

    def _settle(self, group: list[str], config: PretrainedConfig) -> None:
        """Tied weights stay so when they still agree; otherwise each is written."""
        changed = [n for n in group if any(a.touches(n) for a in self._updates)]
        if not changed:
            return
        first = changed[0]
        together = all(a.keeps_ties for a in self._updates)
        if together or (
            changed == group
            and all(torch.equal(self._value(first), self._value(other)) for other in group[1:])
        ):
            self._same |= dict.fromkeys(group, first)
        else:
            config.tie_word_embeddings = False
            config.get_text_config().tie_word_embeddings = False

    def _check_shapes(self) -> None:
        for name, wanted in self._shapes.items():
            held = (a.shape(a.replaced[name]) for a in self._updates if name in a.replaced)
            found = next(held, self._base.shape(self._origin[name]))
            if found != wanted:
                raise RequestError(
                    f"{self._updates[0].path}: {name} would be {found}, and the merged model's "
                    f"is {wanted}: the adapter was trained on another base, or holds grown "
                    "embeddings on one side only"
                )

    def names(self) -> Iterable[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return cut(self.tensor(name), offset, size)

    def tensor(self, name: str) -> Tensor:
        return self._value(self._same[name])

    def origin(self, name: str) -> str:
        """The base's name of it: another one where the base's embeddings are tied."""
        return self._origin[name]

    def _value(self, name: str) -> Tensor:
        value = read_whole(self._base, self._origin[name])
        transposed = isinstance(self._layers.get(name.rpartition(".")[0]), _TRANSPOSED)
        for update in self._updates:
            if update.touches(name):
                value = update.change(name, value.float(), transposed)
        return value


def _tied(model: PreTrainedModel) -> list[list[str]]:
    """The names of all that is saved, those of one tensor together."""
    groups: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(value), []).append(name)
    return list(groups.values())
