"""Virtual tokens: learned positions before every example, as prompt and prefix tuning have them.

They are real positions of a sample. Before each example stand `virtual_tokens` placeholders,
whose input ids are -1, -2 and so on and which are no targets; the example's own positions
begin after them. So they are packed, split over ranks and isolated as all other positions are.

In prompt tuning (Lester et al. 2021, arXiv:2104.08691) their embeddings are learned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

PROMPT = "prompt"  # name of the module in the input embedding


def virtual_ids(count: int) -> Tensor:
    """The input ids of the placeholders before an example, int64 [count]."""
    return -1 - torch.arange(count)


def virtual_index(ids: Tensor) -> Tensor:
    """Which virtual token stands at each position; 0 where a real one does."""
    return (-1 - ids).clamp(min=0)


class Prompt(nn.Module):
    """The embeddings of the virtual tokens, `weight` [virtual tokens, hidden]."""

    def __init__(self, count: int, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, hidden, device=device))
        self.ids: Tensor | None = None  # those that are being looked up

    def forward(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """`embedded` [.., hidden], with the learned vectors where `ids` [..] are negative; in the
        wider type of the two."""
        learned = functional.embedding(virtual_index(ids), self.weight)
        return torch.where((ids < 0)[..., None], learned, embedded)


def add_prompt(model: PreTrainedModel, count: int) -> None:
    """Let the input embedding of `model` put learned vectors at negative ids, in place."""
    embedding = model.get_input_embeddings()
    weight = embedding.weight
    setattr(embedding, PROMPT, Prompt(count, weight.shape[1], weight.device))
    # hooks, which stay outside of whatever replaces `forward` later, and are of no one module, so
    # that a copy of the model calls its own
    embedding.register_forward_pre_hook(_note_ids)
    embedding.register_forward_hook(_put_learned)
    hide_virtual(model)


def hide_virtual(model: PreTrainedModel) -> None:
    """Let the input embedding of `model` look up token 0 at negative ids, in place."""
    model.get_input_embeddings().register_forward_pre_hook(_as_token)


def _as_token(embedding: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].clamp(min=0), *args[1:])


def _note_ids(embedding: nn.Module, args: tuple[Any, ...]) -> None:
    prompt = embedding.get_submodule(PROMPT)
    assert isinstance(prompt, Prompt)
    prompt.ids = args[0]


def _put_learned(embedding: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> Tensor:
    prompt = embedding.get_submodule(PROMPT)
    assert isinstance(prompt, Prompt) and prompt.ids is not None
    ids, prompt.ids = prompt.ids, None
    found: Tensor = prompt(ids, embedded)
    return found
