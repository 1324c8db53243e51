"""The config's model, shrunk, and the layouts it is tried under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from rostra.build import check_layout
from rostra.config import Config
from rostra.config.schema import MemorySection, ParallelTable, PrecisionSection, TrainSection
from rostra.errors import RequestError
from rostra.layout import Layout
from rostra.models import model_on_meta, pretrained_on_meta, scratch_config, shrunk, takes_positions
from rostra.models.tiny import as_even
from rostra.train.choose import choose_compute, choose_layout
from rostra.verify.compare import Distance
from rostra.verify.layouts import NAMED, OWN, Asked, own_layout, ranks_of, with_layout
from rostra.verify.steps import CPU, Build, Work

LENGTH, LAYERS = 32, 4  # of the shrunk model, at the least


@dataclass
class Checked:
    """One layout and how it did. `agrees` is None where it was not run: `reason` says why."""

    asked: Asked
    layout: Layout | None = None
    distance: Distance | None = None
    memory_bytes: int | None = None
    agrees: bool | None = None
    reason: str = ""

    @property
    def grouped(self) -> bool:
        """Whether it runs in a group of ranks, as training under it would."""
        return self.layout is not None and self.layout.distributed

    def excess(self, tolerance: Distance) -> float:
        """How many times the tolerance it is away from one process."""
        return 0.0 if self.distance is None else self.distance.worst(tolerance).excess

    def to_dict(self) -> dict[str, Any]:
        apart = self.distance.to_dict() if self.distance is not None else {}
        return {
            "name": self.asked.name,
            "layout": self.layout.to_dict() if self.layout is not None else self.asked.keys,
            "ranks": self.asked.ranks,
            **{f"{x}_difference": apart.get(x) for x in ("loss", "gradient", "parameter")},
            "memory_bytes": self.memory_bytes,
            "agrees": self.agrees,
            "reason": self.reason,
        }


def precise(config: Config, precision: str) -> Config:
    """Never compiled: that is no matter of layouts, and takes a minute for each."""
    section = config.precision
    if precision == "config":
        section = section.model_copy(update={"compute": choose_compute(config, CPU)})
    elif precision == "fp32":
        section = PrecisionSection(compute="fp32")
    elif precision in ("bf16", "bf16_pure", "fp16", "fp8"):
        section = section.model_copy(update={"compute": precision})
    else:
        raise RequestError(
            f"--precision {precision}: is fp32, bf16, bf16_pure, fp16, fp8, or config for the "
            "config's own"
        )
    train = config.train.model_copy(update={"compile": False})
    return config.model_copy(update={"precision": section, "train": train})


def whole_shape(config: Config) -> PretrainedConfig:
    """Of the config's whole model; its data is not looked at."""
    if config.model.pretrained is not None:
        shape = pretrained_on_meta(config.model.pretrained).config
    else:
        vocabulary = config.data.tokenizer.vocabulary or 8192
        special: dict[str, int | None] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        shape = scratch_config(config.model, vocabulary, config.data.sequence_length, special)
    return shape


def asked_layouts(
    config: Config, layouts: Mapping[str, dict[str, Any]] | None, most: int
) -> list[Asked]:
    if layouts is not None:
        return [
            own_layout(config, most) if name == OWN else with_layout(config, name, keys)
            for name, keys in layouts.items()
        ]
    engine = config.parallel.engine if config.parallel != "auto" else "torch"
    standard = [
        with_layout(config, name, keys)
        for name, keys in NAMED.items()
        if keys.get("engine", "torch") in ("torch", engine)
    ]
    own = own_layout(config, most)
    plain = own.ranks == 1 and engine == "torch" and config.memory == MemorySection()
    return standard if plain else [own, *standard]


def checkable(
    asked: Asked, full: PretrainedConfig, most: int, samples: int, own: Config
) -> Checked:
    """The layout, or the reason why there is none for this config and its whole model. `own` is
    the user's config, whose layout is also checked with the axes that it has there."""
    case = Checked(asked)
    if asked.ranks > most:
        case.reason = f"needs {asked.ranks} ranks; start them here with --workers {asked.ranks}"
        return case
    config = asked.config.model_copy(update={"train": _train_section(asked.config, samples)})
    try:
        if asked.name.startswith(OWN):
            _check_whole(own, full)
        layout = choose_layout(config, CPU, 0, 0, asked.ranks)
        check_layout(config, layout, full)
        case.layout = layout
    except RequestError as error:
        case.reason = str(error)
    return case


def _check_whole(config: Config, full: PretrainedConfig) -> None:
    """Raises RequestError when the config's layout, in full size, cannot be."""
    if config.parallel != "auto":
        layout = choose_layout(config, CPU, 0, 0, ranks_of(config.parallel))
        check_layout(config, layout, full)


def _train_section(config: Config, samples: int) -> TrainSection:
    """Few samples in several micro batches, as many as a pipeline needs; chunks of the loss
    that end within these."""
    table = config.parallel if config.parallel != "auto" else ParallelTable()
    rows = samples // ((table.replicate or 1) * (table.shard or 1))
    micro = max(1, min(2, rows // (2 * table.pipeline)))
    update = {
        "global_batch_size": samples,
        "micro_batch_size": samples if config.memory.optimizer_in_backward else micro,
        "loss_chunk": min(config.train.loss_chunk or 24, 24),
    }
    return config.train.model_copy(update=update)


def work_of(
    config: Config,
    full: PretrainedConfig,
    cases: Sequence[Checked],
    samples: int,
    steps: int,
    build: Build,
) -> Work:
    """The steps to take: of a model with layers enough for the stages of all layouts."""
    layouts = [case.layout for case in cases if case.layout is not None]
    stages = max((layout.pipeline * layout.stages for layout in layouts), default=1)
    asked = config.data.sequence_length
    length = as_even(asked, min(LENGTH, asked))
    shape = shrunk(full, max(LAYERS, stages), length)
    try:
        model = model_on_meta(shape)
    except Exception as error:  # whatever a model of an unknown family may raise
        raise RequestError(
            f"a {shape.model_type} model cannot be shrunk: {error}; take one of model.architecture"
        ) from error
    if config.data.isolate_documents and not takes_positions(model):
        raise RequestError(
            f"data.isolate_documents: a {type(model).__name__} takes no position ids, so its "
            "attention cannot be kept within documents; set data.isolate_documents: false"
        )
    return Work(shape, samples, length, steps, config.run.seed, build)


def small(config: Config, work: Work) -> Config:
    """`config` for the shrunk model and the samples of `work`."""
    data = config.data.model_copy(update={"sequence_length": work.length})
    train = _train_section(config, work.samples)
    # saved adapters have the whole model's shapes
    adapter = config.adapter.model_copy(update={"pretrained": None, "frozen": ()})
    return config.model_copy(update={"data": data, "train": train, "adapter": adapter})
