"""A plan's figures as people read them."""

from __future__ import annotations

import pytest

from rostra.layout import Layout
from rostra.plan.words import amount, duration, signed_bytes, signed_share, words, words_apart

SHARDED = Layout(1, 1, shard=4, tensor=2, sharding="full_shard", compute="bf16")


@pytest.mark.parametrize(("layout", "said"), [
    (Layout(4, 2), "one process"),
    (Layout(4, 2, replicate=8), "replicate 8"),
    (SHARDED, "full_shard 4, tensor 2"),
    (Layout(1, 1, replicate=2, shard=4, sharding="hybrid_shard"), "hybrid_shard 2 x 4"),
    (Layout(1, 8, pipeline=4, pipeline_schedule="interleaved_1f1b", stages=2),
     "pipeline 4 (interleaved_1f1b, 2 stages a rank)"),
    (Layout(1, 1, "deepspeed", shard=2, sharding="full_shard", offload_parameters="cpu",
            offload_optimizer="nvme", activation_checkpointing="full"),
     "deepspeed, full_shard 2, full checkpointing, parameters on the host, optimizer on NVMe"),
    (Layout(1, 1, "deepspeed", sharding="full_shard", offload_parameters="cpu",
            offload_optimizer="cpu"),
     "deepspeed, full_shard, parameters and optimizer on the host"),
])  # fmt: skip
def test_a_layout_in_a_line(layout: Layout, said: str) -> None:
    assert words(layout) == said


def test_what_configs_settle_is_told_where_it_differs() -> None:
    lora = Layout(1, 1, adapter="lora", compute="bf16")
    assert words_apart([SHARDED, lora]) == ["full_shard 4, tensor 2", "adapter lora"]
    assert words_apart([SHARDED, SHARDED]) == 2 * ["full_shard 4, tensor 2"]


@pytest.mark.parametrize(("hours", "said"), [
    (0.541, "32.5 min"), (13.9, "13.9 h"), (240.0, "10 days"), (1e5, "4,167 days"),
    (42.3 / 3600, "42.3 s"), (0.05 / 3600, "50 ms"), (100 / 3600, "1.67 min"),
])  # fmt: skip
def test_durations_have_three_digits(hours: float, said: str) -> None:
    assert duration(hours) == said


def test_money_and_differences() -> None:
    assert [amount(x) for x in (0.042, 17.28, 1234.5)] == ["0.04", "17.28", "1,234"]
    assert [signed_bytes(x) for x in (2 * 10**9, -3 * 10**6, 10)] == ["+2.0 GB", "-3.0 MB", "same"]
    assert [signed_share(x) for x in (0.061, -0.004)] == ["+6%", "same"]
