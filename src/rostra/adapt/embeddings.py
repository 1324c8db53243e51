"""More rows in a model's embeddings, for tokens that were added to its vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rostra.errors import RequestError
from rostra.pieces import Reader

_ROWS = 4096  # read at a time


@dataclass(frozen=True)
class Grown:
    """What `grow_embeddings` did: the tensors that have new rows, by name, and the modules."""

    before: int
    after: int
    tensors: tuple[str, ...]
    modules: tuple[str, ...]

    @property
    def notice(self) -> str:
        """What a user should know of it."""
        return (
            f"the vocabulary grows from {self.before:,} to {self.after:,} tokens: new rows of "
            f"{' and '.join(self.modules)} begin as the mean of the old ones. Under an adapter "
            "these modules train whole and are saved with it; a merged model has the larger "
            "vocabulary, and peft loads the adapter into a base that was resized to it "
            f"(resize_token_embeddings({self.after}))"
        )


def grow_embeddings(model: PreTrainedModel, rows: int) -> Grown | None:
    """Give `model`, on the meta device, embeddings and a head of at least `rows` tokens, in place;
    None where it has as many already. `GrownWeights` fills them.

    Raises RequestError for a head whose size is not that of the embeddings.
    """
    source, head = model.get_input_embeddings(), model.get_output_embeddings()
    before, hidden = source.weight.shape
    if rows <= before:
        return None
    if head is not None and (not isinstance(head, nn.Linear) or head.out_features != before):
        raise RequestError(
            f"data.tokenizer.added: the head of a {type(model).__name__} has another size than "
            "its embeddings, so it cannot be enlarged; add no tokens"
        )
    old = {id(source.weight)} | ({id(head.weight), id(head.bias)} if head is not None else set())
    old.discard(id(None))
    names = tuple(name for name, p in model.named_parameters() if id(p) in old)
    tied = head is not None and head.weight is source.weight
    trains = source.weight.requires_grad
    source.weight = nn.Parameter(source.weight.new_empty(rows, hidden), trains)
    source.num_embeddings = rows
    if head is not None:
        weight = head.weight.new_empty(rows, head.in_features)
        head.weight = source.weight if tied else nn.Parameter(weight, trains)
        head.out_features = rows
        if head.bias is not None:
            head.bias = nn.Parameter(head.bias.new_empty(rows), trains)
    model.config.get_text_config().vocab_size = rows
    modules = [name for name, m in model.named_modules() if m is source or m is head]
    return Grown(before, rows, names, tuple(name.rpartition(".")[2] for name in modules))


class GrownWeights:
    """`weights` with the new rows of `grown`, which are the mean of the old: a Reader.

    So a new token is at first as likely as an average one (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """

    def __init__(self, weights: Reader, grown: Grown) -> None:
        self._weights, self._grown = weights, grown
        self._means: dict[str, Tensor] = {}

    def names(self) -> Iterable[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._weights.shape(name)
        return (self._grown.after, *shape[1:]) if name in self._grown.tensors else shape

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if name not in self._grown.tensors:
            return self._weights.read(name, offset, size)
        shape = self._weights.shape(name)
        if len(offset) < len(shape):  # a stretch of the flattened tensor: whole rows around it
            width = shape[1]
            first, last = offset[0] // width, -(-(offset[0] + size[0]) // width)
            rows = self.read(name, (first, 0), (last - first, width)).flatten()
            return rows[offset[0] - first * width :][: size[0]].clone()
        old = max(0, min(size[0], shape[0] - offset[0]))
        parts = []
        if old:
            parts.append(self._weights.read(name, offset, (old, *size[1:])))
        if old < size[0]:
            columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], size[1:], strict=True))
            row = self._mean(name)[columns]
            parts.append(row.expand(size[0] - old, *row.shape).clone())
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _mean(self, name: str) -> Tensor:
        if name not in self._means:
            shape = self._weights.shape(name)
            zeros, dtype = (0,) * (len(shape) - 1), torch.float32
            total = torch.zeros(shape[1:], dtype=torch.float64)
            for start in range(0, shape[0], _ROWS):
                size = min(_ROWS, shape[0] - start)
                part = self._weights.read(name, (start, *zeros), (size, *shape[1:]))
                dtype = part.dtype
                total += part.double().sum(0)
            self._means[name] = (total / shape[0]).to(dtype)
        return self._means[name]
