"""Evaluation while training and at its end, and the final model."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rostra.adapt import Adapter, save_adapter, virtual_tokens
from rostra.checkpoint import open_checkpoint
from rostra.config import Config
from rostra.data import Packed, Prepared, held_out, held_out_samples
from rostra.evaluate import Evaluation, evaluate, evaluate_examples, xz_bits_per_byte
from rostra.events import Events
from rostra.generate import (
    Sampling,
    all_stops,
    generate_text,
    generate_together,
    load_adapted,
)
from rostra.models import load_model
from rostra.models.weights import real_model
from rostra.parallel import Engine, TorchEngine
from rostra.pieces import Below, read_whole
from rostra.store import RunFolder, commit_folder
from rostra.train.choose import full_rows
from rostra.workers import on_first_rank, this_rank


class Evaluator:
    """Measures the model on the held-out documents, and lets it speak."""

    def __init__(self, config: Config, prepared: Prepared, engine: Engine, events: Events) -> None:
        self.config, self.engine, self.events = config, engine, events
        self.tokenizer = prepared.tokenizer
        self.prepared = prepared
        self._told = False  # that no text is written while training
        if not self._documents:
            events.notice("no document is held out: the model is not evaluated")

    @property
    def _documents(self) -> int:
        return self.prepared.held_out.documents

    def while_training(self, step: int) -> None:
        """On the first `evaluate.documents` documents, in windows that do not overlap."""
        section = self.config.evaluate
        self._measure(step, section.documents, self.config.data.sequence_length, final=False)
        if section.prompt is not None:
            self._speak_while_training(step, section.prompt, section.prompt_tokens)

    def final(self, path: Path) -> dict[str, Any]:
        """On all of them, in overlapping windows; keys of the run's summary. `path` has the
        final model."""
        section, length = self.config.evaluate, self.config.data.sequence_length
        step = self.engine.steps
        stride = min(section.stride or max(1, length // 2), length)
        found = self._measure(step, None, stride, final=True)
        texts = self._documents and not self.config.data.examples
        if section.compare_xz and texts and this_rank() == 0:
            each, whole = xz_bits_per_byte(held_out(self.prepared))
            found |= {"xz_bits_per_byte": each, "xz_whole_bits_per_byte": whole}
        if section.prompt is not None and this_rank() == 0:
            model = whole_model(self.engine) or load_final(path, self.config.adapter.frozen)
            found["generated"] = self._speak(step, section.prompt, 4 * section.prompt_tokens, model)
        return found

    def _measure(
        self, step: int, documents: int | None, stride: int, final: bool
    ) -> dict[str, Any]:
        if not self._documents:
            return {"eval_loss": None, "bits_per_byte": None}
        began = time.perf_counter()
        found = (
            self._examples(documents)
            if self.config.data.examples
            else self._windows(documents, stride)
        )
        seconds = round(time.perf_counter() - began, 3)
        self.events.emit(
            "evaluation", step=step, seconds=seconds, final=final, stride=stride, **found.to_dict()
        )
        return {"eval_loss": found.loss, "bits_per_byte": found.bits_per_byte}

    def _windows(self, documents: int | None, stride: int) -> Evaluation:
        start = self.tokenizer.bos_token_id
        return evaluate(
            self.engine.forward,
            islice(held_out(self.prepared), documents),
            self.tokenizer.eos_token_id if start is None else start,
            self.config.data.sequence_length,
            stride,
            self._rows,
        )

    def _examples(self, documents: int | None) -> Evaluation:
        return evaluate_examples(
            self.engine.forward, self._packed, self.tokenizer, self._rows, documents
        )

    @cached_property
    def _packed(self) -> Packed:
        rows = full_rows(self.config, self.engine.layout)
        virtual = virtual_tokens(self.config.adapter)
        return held_out_samples(self.prepared, self.config.data, rows, virtual)

    @property
    def _rows(self) -> int:
        """Samples that all ranks compute at once."""
        return self.engine.layout.micro_batch * self.engine.layout.data

    def _speak_while_training(self, step: int, prompt: str, tokens: int) -> None:
        """By the model that rank 0 holds, or by all ranks together."""
        if (model := whole_model(self.engine)) is not None:
            if this_rank() == 0:
                self._speak(step, prompt, tokens, model)
            return
        sampling, virtual = self._sampling(tokens), virtual_tokens(self.config.adapter)
        text = generate_together(self.engine, self.tokenizer, prompt, sampling, virtual)
        if text is not None:
            self.events.emit("generation", step=step, prompt=prompt, text=text)
        elif not self._told:
            self._told = True
            self.events.notice(
                "evaluate.prompt: the ranks of this layout share each sample, so no text is "
                "written while training; the final model writes at the end"
            )

    def _speak(self, step: int, prompt: str, tokens: int, model: PreTrainedModel) -> str:
        text = generate_text(model, self.tokenizer, prompt, self._sampling(tokens))
        self.events.emit("generation", step=step, prompt=prompt, text=text)
        return text

    def _sampling(self, tokens: int) -> Sampling:
        return Sampling(tokens, seed=self.config.run.seed)


def load_final(path: Path, frozen: Sequence[str]) -> PreTrainedModel:
    """The final model of a run, or its base with the adapter and those that it kept `frozen`."""
    return load_adapted(path, frozen) if path.name == "adapter" else load_model(str(path))


def whole_model(engine: Engine) -> PreTrainedModel | None:
    """The model that this rank holds, when it holds all of it and can run it by itself, which
    wants no virtual tokens."""
    layout = engine.layout
    split = layout.pipeline * layout.tensor * layout.context > 1
    split = split or layout.adapter in ("prompt", "prefix")
    if split or layout.sharding not in ("no_shard", "zero1") or not isinstance(engine, TorchEngine):
        return None
    return engine.model


def save_model(folder: RunFolder, engine: Engine, tokenizer: Any, step: int) -> None:
    """The final model as transformers saves it, with its tokenizer: whole or not at all.

    All ranks call this. Where no rank holds the whole model, rank 0 reads it from the
    checkpoint of the last step, into its host's memory.
    """
    checkpoint = None if whole_model(engine) else open_checkpoint(folder.checkpoint(step))

    def save() -> None:
        model = whole_model(engine)
        if model is None:
            assert checkpoint is not None
            model = real_model(engine.shape, Below("model", checkpoint.reader()))
        # transformers may import accelerate, and that DeepSpeed, which logs to standard output
        with commit_folder(folder.model, step=step) as path, redirect_stdout(sys.stderr):
            model.config.use_cache = True
            stops = all_stops(model.generation_config, tokenizer)
            model.generation_config.eos_token_id = stops or None
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)

    on_first_rank(save)


def save_adapter_of(
    folder: RunFolder, adapter: Adapter, base: str | None, tokenizer: Any, step: int
) -> None:
    """The trained adapter as peft saves it, with the tokenizer: whole or not at all. All ranks
    call this; rank 0 reads it from the checkpoint of the last step."""
    checkpoint = open_checkpoint(folder.checkpoint(step))

    def save() -> None:
        weights = Below("model", checkpoint.reader())
        tensors = {name: read_whole(weights, name) for name in adapter.keys}
        with commit_folder(folder.adapter, step=step) as path, redirect_stdout(sys.stderr):
            save_adapter(path, tensors, adapter, base)
            tokenizer.save_pretrained(path)

    on_first_rank(save)
