"""`rostra merge`: adapters merged into their base, written as a model of transformers."""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import GenerationConfig

from rostra.config.tuning import QuantizationTable
from rostra.data import load_tokenizer
from rostra.errors import RequestError
from rostra.export.agreement import (
    Measure,
    check,
    difference,
    probe_tokens,
    reference,
    rounding,
    written,
)
from rostra.export.bases import Base, Notice, open_base
from rostra.export.merged import Merged
from rostra.export.updates import Update, Weighted, open_updates
from rostra.generate import all_stops
from rostra.models import model_on_meta
from rostra.models.weights import WEIGHTS_INDEX, real_model
from rostra.store import commit_folder


def merge(
    base: str,
    adapters: Sequence[Weighted],
    output: Path,
    *,
    quantization: QuantizationTable | None = None,
    dequantize: bool = True,
    tokenizer: str | None = None,
    measure: Measure | None = None,
    notice: Notice = print,
    shard_size: int | str = "5GB",
) -> dict[str, Any]:
    """Write base and adapters as one model to `output`, and compare its logits with theirs.

    Each tensor is merged in float32 and written in the base's own type. `quantization` is what
    the adapters were trained on; with `dequantize` they are merged into the weights that they
    then saw. `tokenizer` is a folder or hub id, by default what lies beside the last adapter
    that has one, or the base's. `measure` (a perplexity, say) is applied to base with adapters
    and to the merged model.

    Host memory: one file of `shard_size` and one tensor to write it; to compare, the whole
    model in float32.

    Returns: what `rostra merge --json` prints. Raises: RequestError for what cannot be merged,
    or when `output` exists; MergeFailed (exit code 4) when the written model is not base and
    adapters but for rounding, or does no more than the base: nothing is left at `output`.
    """
    if output.exists():
        raise RequestError(f"{output}: exists already; remove it, or choose another --output")
    with redirect_stdout(sys.stderr):  # libraries log there, and it is for the answer
        opened = open_updates(adapters)
        found = open_base(base, quantization, dequantize, notice)
        merged = Merged(found.config, found.weights, opened)
        _say_changes(found, merged, notice)
        types = {name: found.dtype(merged.origin(name)) for name in merged.names()}
        with commit_folder(output, base=base, adapters=[a.path for a in opened]) as path:
            write_weights(path, merged, types, shard_size)
            _write_config(path, merged, types)
            written_by = _write_tokenizer(path, tokenizer or _tokenizer_of(opened, base), notice)
            _write_generation(path, base, written_by)
            result = _compare(path, found, merged, opened, types, measure)
        if (effect := result["adapter_effect"]) and (
            lost := result["logits_difference"]
        ) > effect / 8:
            notice(f"rounding changes logits by {lost:.1e}, and the adapter by only {effect:.1e}")
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    return {"path": str(output), "bytes": size, **result, "dequantized": found.quantized}


def _say_changes(base: Base, merged: Merged, notice: Notice) -> None:
    before, after = (c.get_text_config() for c in (base.config, merged.config))
    if before.vocab_size != after.vocab_size:
        notice(
            f"the adapter brings grown embeddings: the merged model has {after.vocab_size:,} "
            f"tokens, the base {before.vocab_size:,}"
        )
    if before.tie_word_embeddings != after.tie_word_embeddings:
        notice("the adapter changes one of two tied embeddings: the merged model has both")


def write_weights(
    path: Path, merged: Merged, types: dict[str, torch.dtype], shard_size: int | str
) -> None:
    """Files of at most `shard_size`, and their index, as transformers names them."""
    empty = {n: torch.empty(merged.shape(n), dtype=types[n], device="meta") for n in types}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=shard_size)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: merged.tensor(name).to(types[name]).contiguous() for name in names}
        save_file(tensors, path / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (path / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_config(path: Path, merged: Merged, types: dict[str, torch.dtype]) -> None:
    config = merged.config
    config.architectures = [type(model_on_meta(config)).__name__]
    largest = max(types, key=lambda name: math.prod(merged.shape(name)))
    config.dtype = types[largest]  # in which transformers loads it
    config.save_pretrained(path)


def _write_tokenizer(path: Path, tokenizer: str, notice: Notice) -> Any:
    """The tokenizer, if there is one."""
    try:
        loaded = load_tokenizer(tokenizer)
    except RequestError as error:
        notice(f"written without a tokenizer: {error}")
        return None
    loaded.save_pretrained(path)
    return loaded


def _write_generation(path: Path, base: str, tokenizer: Any) -> None:
    """The base's own, if it has one, and where the tuned model stops."""
    config = GenerationConfig()
    with suppress(OSError):
        config = GenerationConfig.from_pretrained(base)
    if tokenizer is not None:
        config.eos_token_id = all_stops(config, tokenizer) or None
    config.save_pretrained(path)


def _tokenizer_of(updates: Sequence[Update], base: str) -> str:
    own = [u.path for u in updates if (Path(u.path) / "tokenizer.json").exists()]
    return own[-1] if own else base


def _compare(
    path: Path,
    base: Base,
    merged: Merged,
    adapters: Sequence[Update],
    types: dict[str, torch.dtype],
    measure: Measure | None,
) -> dict[str, Any]:
    """One model at a time is in memory: each is in cycles, and goes when these are collected."""
    tokens, rows = probe_tokens(merged.config), merged.config.get_text_config().vocab_size
    expected = reference(base.config, base.weights, adapters, tokens, rows, measure)
    gc.collect()
    rounded = rounding(real_model(merged.config, merged), types, tokens)
    gc.collect()
    found, measured = written(path, tokens, measure)
    gap, bound = check(found, expected, rounded)
    result = {"logits_difference": gap, "rounding_bound": bound, "adapter_effect": expected.effect}
    if base.other is not None:
        other = difference(
            found, reference(base.config, base.other, adapters, tokens, rows).adapted
        )
        stored, seen = (other, gap) if base.quantized else (gap, other)
        result |= {"difference_from_stored_base": stored, "difference_from_quantized_base": seen}
    return result | {
        "perplexity_before": expected.measured,
        "perplexity_after": measured,
    }
