"""Whether a merged model computes what its base and adapters do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rostra.errors import RostraError
from rostra.export.updates import Update
from rostra.generate import with_adapters
from rostra.models import evaluating, load_model
from rostra.models.weights import real_model
from rostra.pieces import Reader

Measure = Callable[[PreTrainedModel], float]

_SEQUENCES, _LENGTH = 4, 32
_EPS = torch.finfo(torch.float32).eps
_NOTHING = 64 * _EPS  # as a share of the largest logit
_ORDER = 16 * _EPS  # what other orders of float32 sums do, as a relative error of each weight


class MergeFailed(RostraError):
    """The merged model is not what base and adapter are; nothing was written."""


@dataclass(frozen=True)
class Reference:
    """What base and adapters compute in float32, through peft: logits
    [sequences, positions, vocabulary], those of the bare base (None where the embeddings were
    grown), and what was measured on it."""

    adapted: Tensor
    bare: Tensor | None
    measured: float | None = None

    @property
    def largest(self) -> float:
        return float(self.adapted.abs().max())

    @property
    def effect(self) -> float | None:
        """How far the adapters move the logits."""
        return None if self.bare is None else difference(self.adapted, self.bare)


def difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference; NaN where there is one."""
    return float((one - other).abs().max())


def probe_tokens(config: PretrainedConfig) -> Tensor:
    """A few sequences over the whole vocabulary, the last with its last tokens, which are
    those that grown embeddings have more: int64 [sequences, positions]."""
    text = config.get_text_config()
    rows = text.vocab_size
    length = min(_LENGTH, rows, getattr(text, "max_position_embeddings", None) or _LENGTH)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(rows, (_SEQUENCES - 1, length), generator=generator)
    return torch.cat([drawn, torch.arange(rows - length, rows)[None]])


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with evaluating(model):
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
    return found.float()


def reference(
    config: PretrainedConfig,
    base: Reader,
    adapters: Sequence[Update],
    tokens: Tensor,
    rows: int,
    measure: Measure | None = None,
) -> Reference:
    """Base and adapters side by side, in float32. Host memory: the whole model.

    `rows` are the merged model's embeddings, which may have grown.
    """
    model = real_model(config, base)
    grown = rows != config.get_text_config().vocab_size
    bare = None if grown else logits(model, tokens)
    adapted = _weighted(model, adapters)
    found = logits(adapted, tokens)
    return Reference(found, bare, measure(adapted) if measure else None)


def _weighted(model: PreTrainedModel, adapters: Sequence[Update]) -> Any:
    """peft's own model of them, each at its weight."""
    from peft.tuners.lora import LoraLayer

    adapted = with_adapters(model, [adapter.path for adapter in adapters])
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            for number, adapter in enumerate(adapters):
                layer.set_scale(str(number), adapter.weight)
    return adapted


def rounding(merged: PreTrainedModel, types: dict[str, torch.dtype], tokens: Tensor) -> float:
    """By how much logits change when the weights of `merged`, float32, are rounded to `types`
    and moved by float32's own errors, at random. In place."""
    before = logits(merged, tokens)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in (*merged.named_parameters(), *merged.named_buffers()):
            if name in types:
                moved = torch.empty_like(value).uniform_(-1, 1, generator=generator)
                value.copy_(value.to(types[name])).mul_(moved.mul_(_ORDER).add_(1))
    return difference(before, logits(merged, tokens))


def written(path: Path, tokens: Tensor, measure: Measure | None) -> tuple[Tensor, float | None]:
    """Logits of the model in `path`, and what was measured on it."""
    model = load_model(str(path))
    return logits(model, tokens), measure(model) if measure else None


def check(found: Tensor, expected: Reference, rounded: float) -> tuple[float, float]:
    """The difference of the written model's logits from base and adapters, and how large
    rounding may make it: twice what the same rounding did to a float32 merge.

    Raises: MergeFailed when it is larger, or more than half of what the adapters do.
    """
    gap, bound = difference(found, expected.adapted), 2 * rounded + _NOTHING * expected.largest
    effect = expected.effect
    if effect is not None and not effect > _NOTHING * expected.largest:
        raise MergeFailed(
            "the adapter does nothing: the base's logits with it and without differ by at most "
            f"{effect:.1e}. Was it trained, and is it the right one? Nothing was written"
        )
    if not gap <= bound:
        raise MergeFailed(
            f"the merged model's logits differ by {gap:.1e} from those of base and adapter, and "
            f"rounding explains {bound:.1e}: this adapter does something that a merge cannot "
            "keep. Serve it beside the base. Nothing was written"
        )
    if effect is not None and not 2 * gap < effect:
        raise MergeFailed(
            f"the merged model is little but the bare base: the adapter moves logits by "
            f"{effect:.1e}, and rounding takes {gap:.1e} of it away. Serve it beside the base, or "
            "merge it into the base saved in float32. Nothing was written"
        )
    return gap, bound
