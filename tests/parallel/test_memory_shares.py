"""What a rank holds of parameters, gradients and optimizer states is the share of theory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from common import CPU, LENGTH, batch_of, config_of, part_of
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ranks import Ranks
from rostra.build import build_engine
from rostra.config.schema import ModelSection
from rostra.events import Events
from rostra.layout import Layout
from rostra.memory import measure
from rostra.models import create_model, scratch_config
from rostra.parallel import TorchEngine
from rostra.parallel.held import local
from rostra.train import train_step
from support import REPOSITORY

KINDS = ("parameters", "gradients", "optimizer")
PAGE = REPOSITORY / "docs" / "communication.md"
ADAMW = 2  # states of a parameter's size

# Which kinds lie in parts; all others are whole on every rank (ZeRO, arXiv:1910.02054, figure 1).
IN_PARTS: dict[str, tuple[str, ...]] = {
    "no_shard": (),
    "zero1": ("optimizer",),
    "shard_grad_op": KINDS,
    "full_shard": KINDS,
    "hybrid_shard": KINDS,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "no_shard, 2": {"replicate": 2},
    "zero1, 2": {"shard": 2, "sharding": "zero1"},
    "zero1, 4": {"shard": 4, "sharding": "zero1"},
    "shard_grad_op, 2": {"shard": 2, "sharding": "shard_grad_op"},
    "shard_grad_op, 4": {"shard": 4, "sharding": "shard_grad_op"},
    "full_shard, 2": {"shard": 2, "sharding": "full_shard"},
    "full_shard, 4": {"shard": 4, "sharding": "full_shard"},
    "hybrid_shard, 2 of 4": {"shard": 2, "replicate": 2, "sharding": "hybrid_shard"},
}


def llama() -> PreTrainedModel:
    size = {"hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 4, "intermediate_size": 128}
    section = ModelSection.model_validate({"architecture": "llama", "size": size})
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return create_model(scratch_config(section, 512, LENGTH, special), 1)


@cache
def theory() -> dict[str, int]:
    """Bytes of each kind in one process, with float32 everywhere."""
    whole = 4 * sum(p.numel() for p in llama().parameters())
    return {"parameters": whole, "gradients": whole, "optimizer": ADAMW * whole}


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        # what torch.compile traced in this process before is no memory, and has no address
        with contextlib.suppress(RuntimeError, NotImplementedError):
            storage = local(tensor).untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def live() -> int:
    """Bytes of all tensors of this process that Python can reach."""
    gc.collect()
    return sum(storages(x for x in gc.get_objects() if issubclass(type(x), Tensor)).values())


def at_rest(engine: TorchEngine) -> dict[str, int]:
    """Between the backward pass and the optimizer's step, when all kinds are there."""
    updated = [held.value for held in engine.gradients.held]
    parameters = storages(p for stage in engine.stages for p in stage.parameters())
    states = storages(tree_leaves([dict(part.state) for part in engine.optimizers.parts]))
    return {
        "parameters": sum(parameters.values()),
        "gradients": sum(storages(x.grad for x in updated).values()),
        "optimizer": sum(states.values()),
    }


def held(layout: Layout) -> dict[str, dict[str, int]]:
    """Bytes by kind: at the peak of the second step as a run measures it, and at rest; and all
    that is live at rest."""
    before = live()
    samples = layout.data * layout.micro_batch * layout.accumulation
    config = config_of(train={"global_batch_size": samples})
    engine = build_engine(config, layout, llama(), CPU, 10, Events())
    train_step(engine, part_of(batch_of(0, samples), engine))
    model, optimizers = engine.measured()
    with measure(model, *optimizers) as memory:
        train_step(engine, part_of(batch_of(1, samples), engine))
    engine.forward_backward(part_of(batch_of(2, samples), engine))
    return {"peak": memory.bytes, "rest": at_rest(engine), "live": {"total": live() - before}}


@pytest.mark.parametrize("name", LAYOUTS)
def test_shares_are_those_of_theory_and_of_the_page(ranks: Ranks, name: str) -> None:
    layout = Layout(micro_batch=1, accumulation=2, **LAYOUTS[name])
    in_parts, whole = IN_PARTS[layout.sharding], theory()
    share = {kind: 1 / layout.shard if kind in in_parts else 1.0 for kind in KINDS}
    for found in ranks.run(layout.world_size, held, layout):
        for when in ("peak", "rest"):
            for kind in KINDS:
                assert found[when][kind] / whole[kind] == pytest.approx(share[kind], rel=0.02)
        # And nothing else is live at rest: what was gathered has been given back.
        assert found["live"]["total"] == pytest.approx(sum(found["rest"].values()), rel=0.02)
        shares = [f"{found['rest'][kind] / whole[kind]:.3f}" for kind in KINDS]
        assert f"| {name} | {' | '.join(shares)} |" in PAGE.read_text()


ZERO: dict[str, float] = {"zero1": 1.0, "shard_grad_op": 1.0, "full_shard": 0.5}


def held_by_deepspeed(layout: Layout) -> dict[str, int]:
    """Weights (under ZeRO-3 each has its part in `ds_tensor`) and states, after two steps.
    Masters and buffers, what `measured` gives last, are not of theory."""
    samples = layout.data * layout.micro_batch * layout.accumulation
    config = config_of(train={"global_batch_size": samples})
    engine = build_engine(config, layout, llama(), CPU, 10, Events())
    for step in range(2):
        train_step(engine, batch_of(step, samples).share(*engine.place))
    model, optimizers = engine.measured()
    parameters = [getattr(p, "ds_tensor", p) for p in model.parameters()]
    states = tree_leaves([dict(optimizer.state) for optimizer in optimizers[:-1]])
    found = {
        "parameters": sum(storages(parameters).values()),
        "optimizer": sum(storages(states).values()),
    }
    engine.close()
    return found


@pytest.mark.parametrize("sharding", ZERO)
def test_shares_under_deepspeed(ranks: Ranks, sharding: Any) -> None:
    pytest.importorskip("deepspeed")
    layout = Layout(1, 2, engine="deepspeed", shard=2, sharding=sharding)
    whole = theory()
    for found in ranks.run(2, held_by_deepspeed, layout):
        assert found["parameters"] / whole["parameters"] == pytest.approx(ZERO[sharding], rel=0.02)
        assert found["optimizer"] / whole["optimizer"] == pytest.approx(0.5, rel=0.02)
