"""The sections of the config file, each with its defaults.

Every section is frozen and refuses unknown keys. A section holds only what works;
a key that is not here does not exist, and is answered with the nearest one that does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rostra.config.base import Count, Fraction, Section, Steps, Whole
from rostra.config.data import DataSection, TokenizerTable
from rostra.config.tuning import (
    AdapterSection,
    AdapterTable,
    QuantizationSection,
    QuantizationTable,
)


class RunSection(Section):
    """What the run is called and where it lives."""

    name: str = Field("run", pattern=r"^[\w.-]+$", description="name of the run")
    output: str | None = Field(None, description="the run's folder; runs/NAME when not given")
    seed: Whole = Field(0, description="seeds weights, order of the data, and dropout")

    @property
    def path(self) -> Path:
        return Path(self.output or f"runs/{self.name}")


class SizeTable(Section):
    """The shape of a model built from scratch; what is not given comes from the preset."""

    hidden_size: Count | None = None
    layers: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_size: Count | None = None
    intermediate_size: Count | None = None
    positions: Count | None = Field(None, description="longest sequence the model is made for")
    tie_embeddings: bool | None = None
    dropout: Fraction | None = None


class ModelSection(Section):
    """A pretrained model, or one from scratch by architecture, preset and size."""

    pretrained: str | None = Field(None, description="a local folder or a hub id")
    architecture: Literal["llama", "qwen3", "mistral", "gemma3", "gpt2"] | None = None
    preset: str | None = Field(
        None, description="a named shape, such as demosthenes, llama-125m, gpt2"
    )
    size: SizeTable = SizeTable()
    attention: Literal["auto", "eager", "sdpa", "blocked", "flash_attention_2"] = "auto"

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        scratch = self.architecture is not None or self.preset is not None
        if (self.pretrained is not None) == scratch:
            raise ValueError(
                "give either `pretrained` (a folder or hub id), "
                "or `preset` and/or `architecture` for a model from scratch"
            )
        if self.pretrained is not None and self.size != SizeTable():
            raise ValueError("`size` is for a model from scratch; a pretrained one has its size")
        return self


class TrainSection(Section):
    """How long, and in what batches."""

    steps: Count | None = None
    tokens: Count | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    global_batch_size: Count = Field(8, description="samples in one optimizer step")
    micro_batch_size: Count | Literal["auto"] = Field(
        "auto", description="samples computed at once"
    )
    compile: bool | Literal["auto"] = "auto"
    neftune_alpha: Annotated[float, Field(gt=0)] | None = Field(
        None, description="noise on the embeddings (NEFTune)"
    )
    loss_chunk: Count | None = Field(
        None,
        description="positions whose logits exist at once; when not given, as many as make 8 "
        "million of them, or 67 million on a GPU, at the most 1024",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [k for k in ("steps", "tokens", "epochs") if getattr(self, k) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "none of them"
            raise ValueError(f"give exactly one of `steps`, `tokens`, `epochs`; given: {said}")
        return self


class OptimizerSection(Section):
    """Which optimizer; weight decay applies to matrices only."""

    name: Literal["adamw", "sgd", "adafactor", "lion", "muon"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Fraction = Field(0.95, description="of sgd and muon")
    matrix_learning_rate: Annotated[float, Field(gt=0)] = Field(
        0.02, description="muon: for matrices; `learning_rate` is for the rest, under AdamW"
    )


class ScheduleSection(Section):
    """The learning rate over the run, as a share of the optimizer's."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: Steps = "3%"
    decay: Steps = Field("20%", description="wsd: the decaying part at the end")
    final_fraction: Fraction = 0.1

    @model_validator(mode="after")
    def _fits(self) -> Self:
        shares = [float(x[:-1]) for x in (self.warmup, self.decay) if isinstance(x, str)]
        if self.name == "wsd" and len(shares) == 2 and sum(shares) > 100:
            raise ValueError("`warmup` and `decay` together are longer than the run")
        return self


class PrecisionSection(Section):
    """`bf16` and `fp16` are autocast over fp32 weights; `bf16_pure` keeps bf16 weights and
    fp32 master weights in the optimizer; `fp8` computes the layers' products in float8."""

    compute: Literal["auto", "fp32", "bf16", "fp16", "bf16_pure", "fp8"] = "auto"
    reduction: Literal["fp32", "bf16"] = Field(
        "fp32", description="type in which gradients travel between ranks"
    )


class ParallelTable(Section):
    """How many ranks split what. `replicate` and `shard` take the ranks that are left when
    neither is given; what is sharded along `shard` says `sharding`."""

    engine: Literal["torch", "deepspeed"] = "torch"
    deepspeed: str | None = Field(None, description="a DeepSpeed JSON file, taken as it is")
    sharding: Literal["no_shard", "zero1", "shard_grad_op", "hybrid_shard", "full_shard"] | None = (
        Field(None, description="what of the model lies in parts; full_shard along `shard`")
    )
    replicate: Count | None = Field(None, description="copies of what is sharded, or of the model")
    shard: Count | None = Field(None, description="ranks that share one copy")
    context: Count = Field(1, description="ranks that split the positions of a sample")
    context_method: Literal["ulysses", "ring"] = Field(
        "ulysses", description="attention over them: by all-to-all of heads, or keys in a ring"
    )
    tensor: Count = Field(1, description="ranks that split the matrices")
    pipeline: Count = Field(1, description="ranks that split the layers")
    expert: Count = 1
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] | None = Field(
        None, description="of the pipeline; 1f1b when there is one"
    )
    stages: Count = Field(1, description="pipeline stages of one rank")

    @model_validator(mode="after")
    def _one_engine(self) -> Self:
        if self.deepspeed is not None and self.engine != "deepspeed":
            raise ValueError("`deepspeed` is read by engine: deepspeed; set it, or leave it out")
        return self


def _checkpointing(value: Any) -> Any:
    """`{every: 2}` and `{selective: mlp}` as `every:2` and `selective:mlp`."""
    if isinstance(value, dict) and len(value) == 1:
        return ":".join(map(str, *value.items()))
    return "selective:operations" if value == "selective" else value


Checkpointing = Annotated[
    str,
    BeforeValidator(_checkpointing),
    Field(
        pattern=r"^(auto|none|full|offload|selective:(attention|mlp|operations)|every:[1-9]\d*)$"
    ),
]


class OffloadTable(Section):
    """What waits outside of the device while it is not needed. `auto` is decided by the plan."""

    parameters: Literal["auto", "none", "cpu", "nvme"] = "auto"
    optimizer: Literal["auto", "none", "cpu", "nvme"] = "auto"
    path: str | None = Field(None, description="the folder on NVMe")


class MemorySection(Section):
    """What is traded for memory: time, precision of states, transfers."""

    activation_checkpointing: Checkpointing = Field(
        "auto",
        description="none, full, selective (or selective:attention, selective:mlp, "
        "selective:operations), every:N layers, or offload to the host; auto: what the plan finds "
        "fastest",
    )
    offload: OffloadTable = OffloadTable()
    optimizer_states: Literal["fp32", "int8", "int4", "fp8", "paged_int8"] = "fp32"
    optimizer_in_backward: bool = Field(
        False, description="update each parameter as soon as its gradient is there"
    )
    keep_freed: bool | Literal["auto"] = Field(
        "auto",
        description="on the CPU, hold on to freed memory for the next step: faster, and up to half "
        "more is resident; auto: unless an adapter trains",
    )


class StabilitySection(Section):
    """What keeps a run from diverging."""

    clip: Annotated[float, Field(gt=0)] | None = Field(1.0, description="maximal gradient norm")
    bad_steps: Whole = Field(10, description="non-finite steps in a row before the run fails")


class CheckpointSection(Section):
    """When the state of the run is saved, and how much of it is kept."""

    every: Count | None = Field(None, description="steps; ten times over the run when not given")
    keep: Count = Field(2, description="complete checkpoints kept")


class EvaluateSection(Section):
    """Evaluation on the held-out documents, and text sampled while training."""

    every: Count | None = Field(None, description="steps; only at the end when not given")
    documents: Count | None = Field(None, description="held-out documents used while training")
    stride: Count | None = Field(
        None, description="positions a window moves on; half a sequence when not given"
    )
    compare_xz: bool = Field(False, description="measure `xz -9` on the held-out documents")
    prompt: str | None = Field(None, description="text to continue at every evaluation")
    prompt_tokens: Count = 64


class MonitorSection(Section):
    """How the run is watched."""

    log_every: Count = Field(10, description="steps between lines in a log or pipe")
    tensorboard: bool = True


class LaunchSection(Section):
    """Clusters (none yet)."""


class ServeSection(Section):
    """Serving (none yet)."""


class Config(Section):
    """One run, as its YAML file asks for it."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    adapter: AdapterSection = AdapterTable()
    quantization: QuantizationSection = QuantizationTable()
    parallel: Literal["auto"] | ParallelTable = "auto"
    memory: MemorySection = MemorySection()
    stability: StabilitySection = StabilitySection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluate: EvaluateSection = EvaluateSection()
    monitor: MonitorSection = MonitorSection()
    launch: LaunchSection = LaunchSection()
    serve: ServeSection = ServeSection()

    @model_validator(mode="after")
    def _batches(self) -> Self:
        micro = self.train.micro_batch_size
        if isinstance(micro, int) and micro > self.train.global_batch_size:
            raise ValueError(
                f"train.micro_batch_size ({micro}) is larger than "
                f"train.global_batch_size ({self.train.global_batch_size})"
            )
        tokenizer = self.data.tokenizer
        if self.model.pretrained is None and tokenizer == TokenizerTable():
            raise ValueError(
                "a model from scratch needs a tokenizer: set data.tokenizer.vocabulary to train "
                "one (8192, say), or data.tokenizer.pretrained to load one"
            )
        if self.memory.optimizer_in_backward and self.stability.clip is not None:
            raise ValueError(
                "memory.optimizer_in_backward updates before the norm of all gradients is known; "
                "set stability.clip: null"
            )
        if self.adapter.kind != "none" and self.model.pretrained is None:
            raise ValueError(
                f"adapter.kind = {self.adapter.kind} trains beside a model that has learned "
                "already; set model.pretrained, or leave `adapter` out"
            )
        if self.adapter.lora_plus_ratio is not None and self.optimizer.name == "muon":
            raise ValueError(
                "adapter.lora_plus_ratio changes AdamW's rate, and optimizer.name is muon; use "
                "adamw, or leave lora_plus_ratio out"
            )
        virtual = self.adapter.kind in ("prompt", "prefix")
        if virtual and not self.data.examples:
            raise ValueError(
                f"adapter.kind = {self.adapter.kind}: learned positions stand before examples, and "
                "data.sources has documents that run on; use lora, or a source of examples such "
                "as `completion`"
            )
        if self.data.streaming and self.train.epochs is not None:
            raise ValueError(
                "train.epochs: nobody knows how long an epoch of data.streaming is; give "
                "train.steps or train.tokens"
            )
        if self.data.held_out == 0 and self.evaluate.every is not None:
            raise ValueError("evaluate.every needs held-out documents; data.held_out is 0")
        return self
