"""What each rank runs: some optimizer steps of a shrunk model, on samples made up from a seed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rostra.adapt import virtual_ids
from rostra.batch import IGNORE, Batch, share_of
from rostra.build import build_engine
from rostra.build.tuned import tune
from rostra.config import Config
from rostra.events import Events
from rostra.layout import Layout
from rostra.memory import measure
from rostra.models import SeededWeights, create_model, model_on_meta
from rostra.parallel import Engine
from rostra.pieces import Piece, Reader
from rostra.train import train_step
from rostra.workers import world_size

CPU = torch.device("cpu")
Build = Callable[..., Engine]  # as `rostra.build.build_engine`


@dataclass(frozen=True)
class Work:
    """The steps that every layout takes: `shape` is the shrunk model's."""

    shape: PretrainedConfig
    samples: int  # of a global batch
    length: int  # positions of a sample
    steps: int
    seed: int
    build: Build = build_engine


@dataclass
class Found:
    """What one rank saw: a loss, gradient norm and number of targets for every step, the peak
    of live tensor bytes of one step, and the parameters' pieces that it would write."""

    losses: list[float]
    norms: list[float]
    targets: list[int]
    memory_bytes: int
    pieces: dict[str, Piece]


def global_batch(work: Work, step: int) -> Batch:
    """Samples of random tokens with very unequal numbers of targets, from all positions down
    to few, each with the end of a document at another place."""
    generator = torch.Generator().manual_seed(1_000_003 * work.seed + step)
    vocabulary = work.shape.get_text_config().vocab_size
    size = (work.samples, work.length + 1)
    tokens = torch.randint(0, vocabulary, size, generator=generator)
    labels = tokens[:, 1:].clone()
    positions = torch.arange(work.length).repeat(work.samples, 1)
    for row in range(work.samples):
        labels[row, : row * work.length // work.samples] = IGNORE
        border = (3 + 5 * row + step) % work.length
        positions[row, border:] -= border
    return Batch(tokens[:, :-1].contiguous(), labels, positions)


def made(config: Config, work: Work) -> tuple[PreTrainedModel, Reader | None]:
    """The shrunk model, as training makes the whole one: in one process with its weights,
    but a tuned one, and that of several ranks, on the meta device with a reader of them."""
    shape, seed = copy.deepcopy(work.shape), work.seed  # models change their configs
    if config.adapter.kind != "none":
        built = tune(model_on_meta(shape), SeededWeights(work.shape, seed), config)
        return built.model, built.weights
    if world_size() == 1:
        return create_model(shape, seed), None
    return model_on_meta(shape), SeededWeights(work.shape, seed)


def run_steps(
    config: Config, layout: Layout, work: Work, order: Sequence[int] | None = None
) -> Found:
    """Take the steps on this rank; `order` is that of the samples in each global batch.

    Collective over the layout's ranks. Memory is measured over the second step, when all
    states exist. Raises RequestError for a layout that the model refuses.
    """
    model, weights = made(config, work)
    engine = work.build(config, layout, model, CPU, work.steps, Events(), weights)
    first, count = share_of(work.samples, *engine.place)
    found = Found([], [], [], 0, {})
    for step in range(work.steps):
        batch = global_batch(work, step)
        if config.adapter.kind in ("prompt", "prefix"):
            count = min(config.adapter.virtual_tokens, work.length // 4)
            batch.input_ids[:, :count] = virtual_ids(count)
        if order is not None:
            batch = Batch(**{n: tensor[list(order)] for n, tensor in batch.tensors().items()})
        measured = step == min(1, work.steps - 1)
        inside, optimizers = engine.measured()
        with measure(inside, *optimizers) if measured else nullcontext() as memory:
            outcome = train_step(engine, batch.rows(first, first + count))
        if memory is not None:
            found.memory_bytes = memory.bytes["total"]
        found.losses.append(outcome.loss)
        found.norms.append(outcome.gradient_norm)
        found.targets.append(round(outcome.tokens))
    found.pieces = _parameters(engine)
    engine.close()
    return found


def _parameters(engine: Engine) -> dict[str, Piece]:
    """This rank's pieces of the parameters, from master weights where there are any."""
    pieces: dict[str, Piece] = {}
    for group in engine.state()[0]:
        for full, piece in group.items():
            kind, _, name = full.partition("/")
            if kind == "master" or (kind == "model" and name not in pieces):
                data = piece.data.detach().float().clone()  # what is sent is no view
                pieces[name] = Piece(data, piece.shape, piece.offset)
    return pieces


def whole(ranks: Iterable[Found]) -> dict[str, Tensor]:
    """The parameters out of the pieces of all ranks; what no rank wrote is not a number."""
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for name, piece in rank.pieces.items():
            if name not in found:
                found[name] = torch.full(piece.shape, float("nan"))
            _part(found[name], piece).copy_(piece.data)
    return found


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    if len(piece.offset) != len(piece.shape):  # a stretch of the flattened tensor
        (start,) = piece.offset
        return tensor.view(-1)[start : start + piece.data.numel()]
    places: list[Any] = [
        slice(start, start + size)
        for start, size in zip(piece.offset, piece.data.shape, strict=True)
    ]
    return tensor[tuple(places)]
