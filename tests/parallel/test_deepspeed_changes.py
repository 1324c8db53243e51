"""Each change of DeepSpeed is still needed: without it, DeepSpeed does what the change is for."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch.distributed as dist
from packaging.version import Version
from test_deepspeed import batch_of, engine_of

from ranks import Ranks
from rostra.parallel.deepspeed_changes import VERSIONS, forget_group, known_norm
from rostra.parallel.deepspeed_start import import_deepspeed
from support import need


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    need(find_spec("deepspeed"), "deepspeed")


def test_the_version_is_one_for_which_they_were_made() -> None:
    first, end = map(Version, VERSIONS)
    assert first <= Version(version("deepspeed")) < end


def own_norm(sharding: str) -> tuple[int, int]:
    """How often DeepSpeed computes the norm in a step of its own, and with the change."""
    engine = engine_of({"sharding": sharding, "shard": 2})
    zero, stage = engine._zero, engine._zero_stage
    name = "scaled_global_norm" if stage < 3 else "_get_norm_groups"
    plain, counts = getattr(type(zero), name), [0, 0]

    for index in range(2):

        def counted(self: object, index: int = index) -> object:
            counts[index] += 1
            return plain(self)

        engine.forward_backward(batch_of(0))
        setattr(type(zero), name, counted)
        try:
            if index == 0:
                engine._engine.step()
            else:
                with known_norm(zero, stage, 1.0):
                    engine._engine.step()
        finally:
            setattr(type(zero), name, plain)
    engine.close()
    return counts[0], counts[1]


@pytest.mark.parametrize("sharding", ["zero1", "full_shard"])
def test_deepspeed_computes_the_norm_in_its_step(ranks: Ranks, sharding: str) -> None:
    assert ranks.run(2, own_norm, sharding) == [(1, 0)] * 2


def after_its_group() -> tuple[bool, bool]:
    """Whether DeepSpeed still has the backend of a group that it has destroyed itself, and
    whether the change takes it away."""
    engine = engine_of({"sharding": "zero1", "shard": 2})
    deepspeed = import_deepspeed(engine.device)
    engine._engine.destroy()
    deepspeed.comm.destroy_process_group()
    assert not dist.is_initialized()
    kept = deepspeed.comm.comm.cdb is not None
    forget_group(deepspeed)
    return kept, deepspeed.comm.comm.cdb is not None


def test_deepspeed_keeps_the_backend_of_a_group_that_has_ended(ranks: Ranks) -> None:
    assert ranks.run(2, after_its_group) == [(True, False)] * 2
