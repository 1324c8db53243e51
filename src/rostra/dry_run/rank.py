"""A rank of any layout, built and run for one step in this process without any memory.

The process group is PyTorch's `fake` one, which takes any rank and world size and sends nothing;
tensors have shapes and no values. What is built is the engine that would train, so a layout that
cannot be built or run fails here as it would on the cluster: on a laptop, before it costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from rostra.adapt import add_adapter
from rostra.adapt.quantized import quantize_model
from rostra.batch import Batch
from rostra.build import build_engine
from rostra.config import Config
from rostra.dry_run.changes import deepspeed_alone, grouped_products, masks_as_in_training
from rostra.dry_run.watch import Watch
from rostra.errors import RequestError
from rostra.events import Events
from rostra.layout import Layout, explain
from rostra.models.weights import model_on_meta
from rostra.parallel import TorchEngine
from rostra.parallel.deepspeed_engine import DeepSpeedEngine
from rostra.parallel.engine import SAMPLED
from rostra.parallel.held import local
from rostra.parallel.in_backward import InBackwardEngine
from rostra.parallel.mesh import DATA, DIMENSIONS
from rostra.parallel.pipeline import SEVERAL
from rostra.parallel.single import OnHost
from rostra.parallel.stage import AUTOCAST
from rostra.workers.group import leave

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DryRun:
    """What one rank of a layout holds and does in a step of one micro batch.

    `bytes` has parameters (buffers included), gradients, optimizer, activations, and their
    `total`: what is there at once at the peak of the forward and backward pass, with the
    optimizer's states, which come into being later, added. Activations are all that is none of
    the others: saved tensors, logits, parameters gathered from other ranks. In a pipeline each
    stage of the rank runs alone, so they are those of one micro batch; a schedule keeps several.
    `collectives` counts calls by kind, without what stages send each other.
    """

    rank: int
    parameters: int  # numbers held, those of other ranks not among them
    bytes: dict[str, int]
    collectives: dict[str, int]
    seconds: float


def dry_run(config: Config, layout: Layout, shape: PretrainedConfig, rank: int = 0) -> DryRun:
    """Build `rank` of `layout` for a model of `shape` as training does, and run a step of it.

    One micro batch goes forward and backward through each stage of the rank, and the optimizer
    takes a step. No memory is taken, and nothing is computed or sent. The device is the CPU:
    attention is that of the CPU, layers are not compiled, fp8 is taken as bf16.

    Raises RequestError for what cannot be trained: a layout that the table of combinations
    refuses, or this model does not allow; a rank that there is not; the deepspeed engine; or
    in a process that has a process group already.
    """
    began = time.perf_counter()
    if layout.engine != "torch":
        raise RequestError(
            f"parallel.engine = {layout.engine}: a dry run takes parallel.engine: torch"
        )
    with fake_rank(config, layout, shape, rank) as (engine, watch):
        assert isinstance(engine, TorchEngine)
        built = len(watch.changes)
        kinds = _step(engine, config.data.sequence_length, watch)
        kept = {"optimizer", "gradients"} if layout.accumulation > 1 else {"optimizer"}
        return DryRun(
            rank=rank,
            parameters=sum(local(x).numel() for s in engine.stages for x in s.parameters()),
            bytes=watch.at_peak(kinds, built, kept),
            collectives=dict(watch.calls),
            seconds=time.perf_counter() - began,
        )


@contextmanager
def fake_rank(
    config: Config, layout: Layout, shape: PretrainedConfig, rank: int = 0
) -> Iterator[tuple[TorchEngine | DeepSpeedEngine, Watch]]:
    """The engine of `rank` of `layout` on fake tensors, and what sees all that is done with it
    inside, from the building on; see `dry_run`. It may be the deepspeed engine too."""
    _check(layout, rank)
    computed = "bf16" if layout.compute == "fp8" else layout.compute
    layout = replace(layout, compile=False, compute=computed)
    watch = Watch(keeps_sent=layout.pipeline_schedule in SEVERAL and layout.context == 1)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # of documents apart from each other a mask is made in any case
    masks = nullcontext() if config.data.isolate_documents else masks_as_in_training()
    with fake_group(rank, layout), masks, grouped_products():
        model = model_on_meta(shape)
        quantize_model(model, config.quantization)
        add_adapter(model, config.adapter)
        weights, memory = Unwritten(model), _traced(fake, watch)
        engine = build_engine(config, layout, model, CPU, 1, Events(), weights, memory)
        assert isinstance(engine, (TorchEngine, DeepSpeedEngine))
        try:
            if engine.mesh.grid is not None:
                for names in (DATA, SAMPLED, DIMENSIONS):  # making them looks at numbers
                    engine.mesh.group(*names)
            with _traced(fake, watch):
                yield engine, watch
        finally:
            engine.close()


def _check(layout: Layout, rank: int) -> None:
    if refused := explain(layout):
        raise RequestError(refused)
    if not 0 <= rank < layout.world_size:
        raise RequestError(
            f"rank = {rank}: this layout has {layout.world_size} ranks; give 0 to "
            f"{layout.world_size - 1}"
        )
    if dist.is_initialized():
        raise RequestError(
            "a dry run stands for all ranks by itself, and this process is one of a group "
            "already; run it in one process"
        )


@contextmanager
def fake_group(rank: int, layout: Layout) -> Iterator[None]:
    """This process as `rank` of ranks that only seem to be there; one rank is no group, unless
    DeepSpeed wants one."""
    if not layout.distributed:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size)
    try:
        with deepspeed_alone() if layout.engine == "deepspeed" else nullcontext():
            yield
    finally:
        leave()


@contextmanager
def _traced(fake: FakeTensorMode, watch: Watch) -> Iterator[None]:
    with fake, watch:
        yield


class Unwritten:
    """A Reader of the weights that `model` will have, which nobody has made."""

    def __init__(self, model: PreTrainedModel) -> None:
        named = (*model.named_parameters(), *model.named_buffers())
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named}

    def names(self) -> Iterable[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return torch.empty(size)


def _step(engine: TorchEngine, length: int, watch: Watch) -> dict[str, set[int]]:
    """The optimizer step of one micro batch; gives the blocks of each kind but activations."""
    with _updates(engine):
        _run_stages(engine, length)
    engine.gradients.collect()
    gradients = engine.gradients
    updated = [held.value for held in gradients.held]
    if isinstance(gradients, OnHost):  # and what those on the host stand for
        updated += [held.value for held in gradients.inner.held]
    kinds = {"gradients": watch.blocks(x.grad for x in updated)}
    engine.optimizers.step()
    engine.gradients.publish()
    states = tree_leaves([dict(part.state) for part in engine.optimizers.parts])
    kinds["optimizer"] = watch.blocks([*states, *updated])
    own = [x for stage in engine.stages for x in (*stage.parameters(), *stage.buffers())]
    kinds["parameters"] = watch.blocks(own)
    return kinds


def _updates(engine: TorchEngine) -> AbstractContextManager[None]:
    """Around a backward pass in which the optimizer steps; around others, nothing."""
    if isinstance(engine, InBackwardEngine):
        return engine.updates.updating(1.0)
    return nullcontext()


def _run_stages(engine: TorchEngine, length: int) -> None:
    """A micro batch of `length` positions forward and backward through each stage alone: the
    schedules of a pipeline wait for what other ranks send."""
    layout, width = engine.layout, engine.shape.get_text_config().hidden_size
    tokens = torch.zeros(layout.micro_batch, length, dtype=torch.int64)
    positions = torch.arange(length).expand(layout.micro_batch, -1)
    batch = Batch(tokens, tokens.clone(), positions)
    between = (layout.micro_batch, length // layout.context, width)
    sent = torch.bfloat16 if layout.compute == "bf16_pure" else torch.float32
    computed = AUTOCAST.get(layout.compute)
    engine.gradients.before(last=True)
    for stage in engine.stages:
        stage.begin(1.0)
        hidden = () if stage.first else (torch.empty(between, dtype=sent, requires_grad=True),)
        with torch.autocast(CPU.type, computed, enabled=computed is not None):
            out = stage(*hidden, **batch.tensors())
            out.backward(torch.ones_like(out))
