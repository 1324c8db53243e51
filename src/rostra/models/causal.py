"""Causal models of transformers: made, loaded, and taken apart where training needs it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from rostra.errors import RequestError
from rostra.models.tiny import tiny_config

logging.disable_progress_bar()  # its bars would run through ours


def load_model(
    path: str, attention: str | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model from a local folder or a hub id, from safetensors only, running no code of it."""
    folder = Path(path)
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        if list(folder.glob("*.bin")):
            raise RequestError(
                f"{path}: the weights are pickles (.bin), which may run code when loaded. "
                "Convert them where you trust them: load the model with transformers and "
                "save it with save_pretrained, which writes safetensors."
            )
        raise RequestError(f"{path}: holds no model weights (*.safetensors)")
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            attn_implementation=attention,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0]
        raise RequestError(
            f"{path}: cannot load this model: {first} "
            "(give a folder that holds config.json and *.safetensors, or a hub id)"
        ) from error
    if missing := sorted({*found["missing_keys"], *map(str, found["mismatched_keys"])}):
        raise RequestError(
            f"{path}: its weights are not complete; missing or of another shape: {missing[:3]}"
        )
    return model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's transformer layers, whatever its family calls it."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise RequestError(f"{type(model).__name__}: found no list of {count} layers in this model")


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether anything is dropped in training, by a module or inside attention."""
    modules = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
    config = vars(model.config.get_text_config())
    return modules or any(k.endswith("dropout") and v for k, v in config.items())


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model takes position ids, which isolate the documents of a sample."""
    return "position_ids" in inspect.signature(model.base_model.forward).parameters


@dataclass(frozen=True)
class Head:
    """What turns hidden states [..., hidden] into logits [..., vocabulary]."""

    module: nn.Module  # as the model has it: a linear layer, or an adapter around one
    softcap: float | None  # logits become softcap * tanh(logits / softcap), as in Gemma 2

    @property
    def layer(self) -> nn.Linear:
        layer = bare_layer(self.module)
        assert isinstance(layer, nn.Linear)
        return layer

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module(hidden)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def bare_layer(module: nn.Module | None) -> nn.Module | None:
    """The model's own layer, where an adapter goes around it."""
    return getattr(module, "base_layer", module)


def output_head(model: PreTrainedModel) -> Head:
    """The head of a model for which `head_splits`."""
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return Head(model.get_output_embeddings(), softcap)


def split_head(model: PreTrainedModel) -> Head | None:
    """The model's head, when backbone and head alone give the model's logits."""
    return output_head(model) if head_splits(model) else None


@torch.no_grad()
def head_splits(model: PreTrainedModel) -> bool:
    """Whether backbone and head alone give the model's logits.

    Tried on a few tokens rather than looked up by family, so that a model which scales or
    shifts its logits in a way not known here is seen, and trained through its full logits. A
    model on the meta device is tried as a tiny one of its family, without adapters.
    """
    layer = bare_layer(model.get_output_embeddings())
    if not isinstance(layer, nn.Linear) or model.base_model is model:
        return False
    if next(model.parameters()).is_meta:
        from rostra.models.weights import create_model  # which stands on this module

        model = create_model(tiny_config(model.config), seed=0)
    head = output_head(model)
    tokens = torch.arange(1, 5, device=head.layer.weight.device)[None]
    with evaluating(model):
        expected = model(input_ids=tokens, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        found = head.logits(hidden).float()
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Dropout off inside, the former mode after."""
    was = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, was, strict=True):
            model.train(training)


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """`parameters` and `trainable_parameters`; tied weights are counted once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {
        "parameters": sum(size for size, _ in sizes),
        "trainable_parameters": sum(size for size, trains in sizes if trains),
    }


def special_tokens(tokenizer: Any) -> dict[str, int | None]:
    """The ids that a model's config records of its tokenizer."""
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
