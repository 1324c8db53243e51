"""Text from a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rostra.data import load_tokenizer
from rostra.errors import RequestError
from rostra.hardware import best_device
from rostra.models import evaluating, load_model


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the most likely one."""

    tokens: int = 128
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0


def load_for_generation(path: str) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer from a run's folder, a model folder, or a hub id."""
    folder = Path(path)
    if (folder / "model" / "config.json").exists():
        path = str(folder / "model")
    elif (adapter := folder / "adapter").is_dir():
        return load_adapted(adapter).to(best_device()), load_tokenizer(adapter)
    elif (folder / "checkpoints").is_dir():
        raise RequestError(f"{path}: this run has no final model yet; let it finish first")
    elif path.startswith((".", "/")) and not (folder / "config.json").exists():
        raise RequestError(f"{path}: no such model: give a run's folder or a model's")
    model = load_model(path).to(best_device())
    return model, load_tokenizer(path)


def load_adapted(path: Path) -> PreTrainedModel:
    """A base model with the adapter in the folder `path`, as peft puts them together."""
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
    return PeftModel.from_pretrained(load_model(base), str(path))


@torch.no_grad()
def generate_text(model: PreTrainedModel, tokenizer: Any, prompt: str, sampling: Sampling) -> str:
    """The text that follows `prompt`. Draws from a stream of its own: training's random
    state is as before afterwards."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is not None and (tokenizer.bos_token_id is not None or ids.shape[1] == 0):
        ids = torch.cat([torch.tensor([[start]]), ids.long()], dim=1)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and ids.shape[1] + sampling.tokens > positions:
        raise RequestError(
            f"--tokens {sampling.tokens}: with a prompt of {ids.shape[1]} tokens that is more "
            f"than the {positions} positions this model is made for"
        )
    if ids.shape[1] == 0:
        raise RequestError("--prompt: this model's tokenizer needs at least one token of prompt")
    ids = ids.to(model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    pad = tokenizer.pad_token_id
    greedy = sampling.temperature == 0
    choice = (
        {}
        if greedy
        else {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    )
    with (
        torch.random.fork_rng(devices=devices),
        torch.compiler.set_stance("force_eager"),  # lengths vary with every token
        evaluating(model),
    ):
        torch.manual_seed(sampling.seed)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.tokens,
            do_sample=not greedy,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id if pad is None else pad,
            **choice,
        )
    text: str = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
    return text
