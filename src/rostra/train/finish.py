"""Evaluation while training and at its end, and the final model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rostra.config import Config
from rostra.data import HeldOut, Prepared, held_out
from rostra.evaluate import evaluate, xz_bits_per_byte
from rostra.events import Events
from rostra.generate import Sampling, generate_text
from rostra.parallel import TorchEngine
from rostra.store import commit_folder


class Evaluator:
    """Measures the model on the held-out documents, and lets it speak."""

    def __init__(
        self, config: Config, prepared: Prepared, engine: TorchEngine, events: Events
    ) -> None:
        self.config, self.engine, self.events = config, engine, events
        self.tokenizer = prepared.tokenizer
        self.prepared = prepared
        if not self._documents:
            events.notice("no document is held out: the model is not evaluated")

    @property
    def _documents(self) -> int:
        return self.prepared.held_out.documents

    def while_training(self, step: int) -> None:
        """On the first `evaluate.documents` documents, in windows that do not overlap."""
        section = self.config.evaluate
        documents = islice(held_out(self.prepared), section.documents)
        self._measure(step, documents, self.config.data.sequence_length, final=False)
        if section.prompt is not None:
            self._speak(step, section.prompt, section.prompt_tokens)

    def final(self) -> dict[str, Any]:
        """On all of them, in overlapping windows; keys of the run's summary."""
        section, length = self.config.evaluate, self.config.data.sequence_length
        step = self.engine.steps
        stride = min(section.stride or max(1, length // 2), length)
        found = self._measure(step, held_out(self.prepared), stride, final=True)
        if section.compare_xz and self._documents:
            each, whole = xz_bits_per_byte(held_out(self.prepared))
            found |= {"xz_bits_per_byte": each, "xz_whole_bits_per_byte": whole}
        if section.prompt is not None:
            found["generated"] = self._speak(step, section.prompt, 4 * section.prompt_tokens)
        return found

    def _measure(
        self, step: int, documents: Iterable[HeldOut], stride: int, final: bool
    ) -> dict[str, Any]:
        if not self._documents:
            return {"eval_loss": None, "bits_per_byte": None}
        began = time.perf_counter()
        start = self.tokenizer.bos_token_id
        found = evaluate(
            self.engine.forward,
            documents,
            self.tokenizer.eos_token_id if start is None else start,
            self.config.data.sequence_length,
            stride,
            self.engine.layout.micro_batch,
        )
        seconds = round(time.perf_counter() - began, 3)
        self.events.emit(
            "evaluation", step=step, seconds=seconds, final=final, stride=stride, **found.to_dict()
        )
        return {"eval_loss": found.loss, "bits_per_byte": found.bits_per_byte}

    def _speak(self, step: int, prompt: str, tokens: int) -> str:
        text = generate_text(
            self.engine.model,
            self.tokenizer,
            prompt,
            Sampling(tokens, seed=self.config.run.seed),
        )
        self.events.emit("generation", step=step, prompt=prompt, text=text)
        return text


def save_model(path: Path, model: PreTrainedModel, tokenizer: Any, step: int) -> None:
    """The final model as transformers saves it, with its tokenizer: whole or not at all."""
    with commit_folder(path, step=step) as folder:
        model.config.use_cache = True
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
