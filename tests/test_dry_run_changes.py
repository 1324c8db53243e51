"""What is changed of other libraries while a rank is tried, and that it is still needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig, masking_utils

from parallel.common import config_of
from rostra.dry_run import rank
from rostra.dry_run.changes import (
    VERSIONS,
    deepspeed_alone,
    grouped_products,
    masks_as_in_training,
)
from rostra.hardware.machine import this_cluster
from rostra.layout import Layout
from rostra.parallel.deepspeed_start import import_deepspeed
from rostra.parallel.stage import Stage
from rostra.plan.job import job_of
from rostra.plan.trace import traced
from support import need


@pytest.mark.parametrize("library", VERSIONS)
def test_the_version_is_one_for_which_the_changes_were_looked_at(library: str) -> None:
    first, below = map(Version, VERSIONS[library])
    assert first <= Version(version(library)) < below


def test_transformers_takes_fake_tensors_for_compiled_ones() -> None:
    with FakeTensorMode():
        tensor = torch.zeros(1)
    assert masking_utils.is_tracing(tensor)
    with masks_as_in_training():
        assert not masking_utils.is_tracing(tensor)
    assert masking_utils.is_tracing(tensor)


def test_shapes_of_grouped_products_are_told_for_bfloat16_alone() -> None:
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    rows, matrices = torch.ones(5, 8), torch.ones(2, 8, 16)
    real = torch._grouped_mm(rows, matrices, offs=offsets)

    def shape() -> tuple[torch.Size, torch.dtype]:
        with FakeTensorMode() as fake:
            given = map(fake.from_tensor, (rows, matrices, offsets))
            found = torch._grouped_mm(*given)
        return found.shape, found.dtype

    with pytest.raises(RuntimeError, match="Expected inputs of BF16"):
        shape()
    with grouped_products():
        assert shape() == (real.shape, real.dtype)


def states_of(sharding: Any, owner: Any = None, name: str = "") -> int:
    """Bytes that the optimizer holds after two steps of DeepSpeed on fake tensors, with one of
    the changes taken back."""
    need(find_spec("deepspeed"), "deepspeed")
    shape = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config = config_of(
        data={"sequence_length": 16, "isolate_documents": False}, train={"global_batch_size": 2}
    )
    layout = Layout(1, 1, engine="deepspeed", shard=2, sharding=sharding, compute="bf16_pure")
    before = getattr(owner, name, None)

    @contextmanager
    def changed() -> Iterator[None]:
        with deepspeed_alone():
            if owner is None:
                yield
            else:
                with patch.object(owner, name, before):
                    yield

    with patch.object(rank, "deepspeed_alone", changed):
        return traced(job_of(config, shape), layout, this_cluster()).kinds["optimizer"]


@pytest.mark.parametrize(
    ("sharding", "name", "said"),
    [
        ("full_shard", "all_gather_object", "not supported for tensor subclasses"),
        ("zero1", "to", "Couldn't swap"),
        ("full_shard", "assert_ints_same_as_other_ranks", "disagreement"),
    ],
)
def test_deepspeed_cannot_start_alone(sharding: str, name: str, said: str) -> None:
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.zero import partitioned_param_coordinator

    owner = {"all_gather_object": dist, "to": Stage}.get(name, partitioned_param_coordinator)
    with pytest.raises(RuntimeError, match=said):
        states_of(sharding, owner, name)
    assert states_of(sharding) > 0


def test_deepspeed_takes_fake_gradients_for_infinite_ones() -> None:
    """And then passes over the step, which would have made the states.

    That Adam for the host reads the memory of fake tensors cannot be shown here: the process
    would end. `tests/plan/test_deepspeed_memory.py` has layouts that run with the change.
    """
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    masters = states_of("zero1", DeepSpeedZeroOptimizer, "has_overflow")
    assert states_of("zero1") == pytest.approx(3 * masters, rel=0.01)
