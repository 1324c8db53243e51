"""Text from a trained model, or from one that is being trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rostra.adapt import read_adapter, virtual_ids
from rostra.batch import IGNORE, Batch
from rostra.config import read_config
from rostra.data import load_tokenizer
from rostra.data.chat import stop_tokens
from rostra.errors import RequestError
from rostra.hardware import best_device
from rostra.models import evaluating, load_model
from rostra.parallel import Engine
from rostra.parallel.engine import MeshEngine
from rostra.store import RunFolder
from rostra.workers import on_first_rank


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the most likely one."""

    tokens: int = 128
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0


def load_for_generation(
    path: str, notice: Callable[[str], None] = lambda _: None
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer from a run's folder (its adapters act, those it kept frozen too), a
    model folder, or a hub id. A base that was quantised for training is taken as it is on disk,
    which `notice` is told."""
    folder = Path(path)
    if (folder / "model" / "config.json").exists():
        path = str(folder / "model")
    elif (adapter := folder / "adapter").is_dir():
        file, frozen = RunFolder(folder).config, tuple[str, ...]()
        if file.exists():
            config = read_config(file)
            frozen = config.adapter.frozen
            if (kind := config.quantization.kind) != "none":
                notice(
                    f"the adapter acts here on the base as it is on disk, not in {kind} as it was "
                    "trained and is evaluated: text and loss differ a little"
                )
        return load_adapted(adapter, frozen).to(best_device()), load_tokenizer(adapter)
    elif (folder / "checkpoints").is_dir():
        raise RequestError(f"{path}: this run has no final model yet; let it finish first")
    elif path.startswith((".", "/")) and not (folder / "config.json").exists():
        raise RequestError(f"{path}: no such model: give a run's folder or a model's")
    model = load_model(path).to(best_device())
    return model, load_tokenizer(path)


def load_adapted(path: Path, frozen: Sequence[str] = ()) -> PreTrainedModel:
    """A base model with the adapter in the folder `path`, and those in `frozen`, as peft puts
    them together."""
    base = read_adapter(str(path), "adapter").config.base_model_name_or_path
    return with_adapters(load_model(base), [*frozen, str(path)])


def with_adapters(model: PreTrainedModel, folders: Sequence[str]) -> Any:
    """peft's model of `model`, which is changed, under all these adapters ("0", "1", ...).

    peft loads grown embeddings into a model alone that has grown before, and takes adapters of
    one kind together: under virtual tokens, the others are merged.
    """
    from peft import PeftModel

    if len(folders) > 1 and read_adapter(folders[-1], "adapter").kind in ("prompt", "prefix"):
        merged = with_adapters(model, folders[:-1]).merge_and_unload()
        return with_adapters(merged, folders[-1:])
    if rows := _grown_rows(model, folders[-1]):
        model.resize_token_embeddings(rows, mean_resizing=False)
    adapted = PeftModel.from_pretrained(model, folders[0], adapter_name="0", torch_device="cpu")
    for number, folder in enumerate(folders[1:], 1):
        adapted.load_adapter(folder, adapter_name=str(number), torch_device="cpu")
    if len(folders) > 1:
        adapted.base_model.set_adapter([str(number) for number in range(len(folders))])
    return adapted


def _grown_rows(model: PreTrainedModel, folder: str) -> int | None:
    """How many embeddings the adapter in `folder` has, where it has some."""
    table = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is table)
    tensors = read_adapter(folder, "adapter").tensors
    keys = (f"base_model.model.{name}.{part}weight" for part in ("", "modules_to_save."))
    held = set(tensors.names())
    return next((tensors.shape(key)[0] for key in keys if key in held), None)


def all_stops(config: GenerationConfig | None, tokenizer: Any) -> list[int]:
    """The tokens at which a model stops: those that it stopped at before, and the tokenizer's."""
    own = None if config is None else config.eos_token_id
    before = own if isinstance(own, list) else [] if own is None else [own]
    return sorted({*before, *stop_tokens(tokenizer)})


def _prompt_ids(
    tokenizer: Any, prompt: str, sampling: Sampling, config: Any, virtual: int
) -> Tensor:
    """The prompt in tokens, int64 [1, positions], behind a bos if there is one.

    Raises: RequestError when that is none, or more than the model is made for, with `virtual`
    positions before it.
    """
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is not None and (tokenizer.bos_token_id is not None or ids.shape[1] == 0):
        ids = torch.cat([torch.tensor([[start]]), ids.long()], dim=1)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and virtual + ids.shape[1] + sampling.tokens > positions:
        raise RequestError(
            f"--tokens {sampling.tokens}: with a prompt of {virtual + ids.shape[1]} tokens that "
            f"is more than the {positions} positions this model is made for"
        )
    if ids.shape[1] == 0:
        raise RequestError("--prompt: this model's tokenizer needs at least one token of prompt")
    return ids.long()


@torch.no_grad()
def generate_text(model: PreTrainedModel, tokenizer: Any, prompt: str, sampling: Sampling) -> str:
    """The text that follows `prompt`, up to an eos or the end of a turn. Draws from a stream of
    its own: training's random state is as before afterwards."""
    adapters = getattr(model, "peft_config", {}).values()
    virtual = max((getattr(one, "num_virtual_tokens", 0) for one in adapters), default=0)
    ids = _prompt_ids(tokenizer, prompt, sampling, model.config, virtual).to(model.device)
    stops = all_stops(model.generation_config, tokenizer)
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
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.tokens,
            do_sample=not greedy,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id if pad is None else pad,
            eos_token_id=stops or None,
            **choice,
        )
    text: str = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def generate_together(
    engine: Engine, tokenizer: Any, prompt: str, sampling: Sampling, virtual: int = 0
) -> str | None:
    """As `generate_text`, from a model in training whose weights may lie in parts over all ranks,
    which call this together; `virtual` learned positions come first. None where a rank does not
    compute samples whole.

    Every token is a forward pass over all before it: for a few tokens now and then.
    """
    layout = engine.layout
    if layout.pipeline * layout.tensor * layout.context > 1 or not isinstance(engine, MeshEngine):
        return None
    ids = _prompt_ids(tokenizer, prompt, sampling, engine.shape, virtual)
    row = torch.cat([virtual_ids(virtual)[None], ids], dim=1)
    first, stops = row.shape[1], all_stops(engine.model.generation_config, tokenizer)
    generator = torch.Generator().manual_seed(sampling.seed)
    with torch.compiler.set_stance("force_eager"):  # lengths vary with every token
        while row.shape[1] < first + sampling.tokens:
            logits = next_logits(engine, row)
            token = on_first_rank(lambda: _chosen(logits, sampling, generator))  # noqa: B023
            row = torch.cat([row, torch.tensor([[token]])], dim=1)
            if token in stops:
                break
    text: str = tokenizer.decode(row[0, first:], skip_special_tokens=True)
    return text


def next_logits(engine: MeshEngine, row: Tensor) -> Tensor:
    """The logits [vocabulary] of what follows the tokens `row` [1, positions], in float32 on the
    CPU. Collective; each rank computes the sample whole."""
    stage, found = engine.stages[0], []

    def note(model: Any, inputs: dict[str, Any], batch: Batch, factor: float) -> Any:
        logits = model(**inputs).logits
        found.append(logits[0, -1].float().cpu())
        nothing = logits.new_zeros(())
        return nothing, nothing

    loss, stage.loss = stage.loss, note
    try:
        rows = row.expand(engine.place[1], -1)  # one for each rank
        positions = torch.arange(row.shape[1]).expand_as(rows)
        engine.forward(Batch(rows, torch.full_like(rows, IGNORE), positions))
    finally:
        stage.loss = loss
    return found[0]


def _chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token: the likeliest, or drawn among the `top_k` of the likeliest that hold
    `top_p` of the probability (Holtzman et al. 2020, arXiv:1904.09751)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    kept = sampling.top_k or len(logits)
    values, tokens = (logits / sampling.temperature).topk(min(kept, len(logits)))
    shares = values.softmax(0)
    shares[shares.cumsum(0) - shares >= sampling.top_p] = 0  # never the first
    return int(tokens[torch.multinomial(shares, 1, generator=generator)])
