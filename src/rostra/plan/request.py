"""What a plan is asked for: a config, or a model's name and a method, as a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PretrainedConfig

from rostra.config import Config, config_from_dict
from rostra.config.tuning import AdapterTable, QuantizationTable
from rostra.errors import RequestError
from rostra.models import find_shape, scratch_config
from rostra.plan.job import Job, job_of

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")

# What a model's name leaves open.
LENGTH, TOKENS = 2048, 100_000_000
SAMPLES: dict[Method, int] = {"full": 128, "lora": 64, "qlora": 64}
VOCABULARY = 50_000  # of a tokenizer that is not here


@dataclass(frozen=True)
class Request:
    """What the command line adds to a config, or stands for one. None: as the config has it."""

    model: str | None = None
    method: Method | None = None
    length: int | None = None
    global_batch: int | None = None
    tokens: int | None = None
    overrides: tuple[str, ...] = ()  # `section.key=value`, of a run that no config describes

    def job(self, config: Config | None, devices: int) -> tuple[Job, tuple[str, ...]]:
        """The job, and what was assumed to make it. Raises RequestError when there is neither
        a config nor a model, and for a model that nobody knows."""
        if self.method is not None and self.method not in METHODS:
            raise RequestError(f"--method {self.method}: give one of {', '.join(METHODS)}")
        assumed: list[str] = []
        if config is None:
            if self.model is None:
                raise RequestError("plan: give a CONFIG, or --model NAME (and --method)")
            config = _config_of(self.model, self.method or "full", devices, self, assumed)
        config = self._changed(config)
        shape = shape_of(config, assumed)
        positions = getattr(shape.get_text_config(), "max_position_embeddings", None)
        if positions is not None and positions < config.data.sequence_length:
            raise RequestError(
                f"data.sequence_length = {config.data.sequence_length}: this model is made for at "
                f"most {positions} positions; give --length {positions} or less"
            )
        return job_of(config, shape), tuple(assumed)

    def _changed(self, config: Config) -> Config:
        sections: dict[str, Any] = {}
        if self.model is not None and config.model.pretrained != self.model:
            sections["model"] = type(config.model)(pretrained=self.model)
        if self.length is not None:
            sections["data"] = config.data.model_copy(update={"sequence_length": self.length})
        train: dict[str, Any] = {}
        if self.global_batch is not None:
            train["global_batch_size"] = self.global_batch
        if self.tokens is not None:
            train |= {"tokens": self.tokens, "steps": None, "epochs": None}
        sections["train"] = config.train.model_copy(update=train)
        return with_method(config.model_copy(update=sections), self.method)


def with_method(config: Config, method: Method | None) -> Config:
    """`config` with the adapter and quantisation of a method; those of its own kind it keeps.
    Raises RequestError for an adapter beside a model that has learned nothing."""
    if method is None:
        return config
    if method != "full" and config.model.pretrained is None:
        raise RequestError(
            f"--method {method}: adapters train beside a model that has learned already; give "
            "model.pretrained or --model, or --method full"
        )
    adapter, quantized = config.adapter, config.quantization
    if method == "full":
        adapter = AdapterTable()
    elif adapter.kind != "lora":
        adapter = AdapterTable(kind="lora")
    if method != "qlora":
        quantized = QuantizationTable()
    elif quantized.kind == "none":
        quantized = QuantizationTable(kind="nf4")
    return config.model_copy(update={"adapter": adapter, "quantization": quantized})


def _config_of(
    model: str, method: Method, devices: int, request: Request, assumed: list[str]
) -> Config:
    """A run of `model`; says in `assumed` what nobody has said."""
    shape = find_shape(model)
    positions = getattr(shape.get_text_config(), "max_position_embeddings", None) or LENGTH
    length = request.length or min(LENGTH, positions)
    samples = request.global_batch or max(SAMPLES[method], devices)
    values = {
        "method": ("--method", request.method, method),
        "samples of": ("--length", request.length, f"{length:,} tokens"),
        "a global batch of": ("--global-batch", request.global_batch, f"{samples:,} samples"),
        "a run of": ("--tokens", request.tokens, f"{TOKENS:,} tokens"),
    }
    assumed += [f"{what} {v} ({flag})" for what, (flag, said, v) in values.items() if said is None]
    if method != "full":
        assumed.append(f"LoRA of rank {AdapterTable().rank} on every linear layer")
    sections: dict[str, Any] = {
        "run": {"name": "plan"},
        "model": {"pretrained": model},
        "data": {"sources": [{"type": "text", "path": "."}], "sequence_length": length},
        "train": {"tokens": request.tokens or TOKENS, "global_batch_size": samples},
    }
    if method != "full":
        sections["adapter"] = {"kind": "lora"}
    if method == "qlora":
        sections["quantization"] = {"kind": "nf4"}
    return config_from_dict(sections, request.overrides)


def shape_of(config: Config, assumed: list[str]) -> PretrainedConfig:
    """The shape of the config's model. Raises RequestError when nobody knows it."""
    section, length = config.model, config.data.sequence_length
    if section.pretrained is not None:
        return find_shape(section.pretrained, length)
    special: dict[str, int | None] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return scratch_config(section, _vocabulary(config, assumed), length, special)


def _vocabulary(config: Config, assumed: list[str]) -> int:
    from rostra.data import load_tokenizer

    table = config.data.tokenizer
    if table.vocabulary is not None:
        return table.vocabulary
    assert table.pretrained is not None, "the config wants one of both"
    try:
        return len(load_tokenizer(table.pretrained))
    except RequestError:
        assumed.append(f"a vocabulary of {VOCABULARY:,} ({table.pretrained} is not here)")
        return VOCABULARY
