"""A plan's figures as people read them."""

from __future__ import annotations

import pytest
import yaml

from rostra.config import config_from_dict
from rostra.layout import Layout
from rostra.plan.results import Candidate, Memory, Time
from rostra.plan.show import BAR, widths
from rostra.plan.words import (
    amount,
    duration,
    elsewhere,
    in_yaml,
    kinds_of,
    signed_bytes,
    signed_share,
    words,
    words_apart,
)

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


SWAPPED = Layout(
    8, 16, "deepspeed", sharding="full_shard", offload_parameters="nvme",
    offload_optimizer="nvme", activation_checkpointing="selective:operations", compute="bf16",
)  # fmt: skip


@pytest.mark.parametrize(("folder", "said"), [(None, "/nvme"), ("/fast disk", "/fast disk")])
def test_what_waits_on_nvme_has_a_folder_in_the_config(folder: str | None, said: str) -> None:
    text = "\n".join(in_yaml(SWAPPED, folder))
    sections = yaml.safe_load(text)
    sections["train"]["steps"] = 1
    data = {"sources": [{"type": "text", "path": "x"}], "tokenizer": {"vocabulary": 300}}
    config = config_from_dict({"model": {"preset": "tiny"}, "data": data, **sections})
    offload = config.memory.offload
    assert (offload.parameters, offload.optimizer, offload.path) == ("nvme", "nvme", said)
    assert config.memory.activation_checkpointing == "selective:operations"
    assert config.parallel != "auto"
    assert config.parallel.engine == "deepspeed"
    assert ("# a folder on your NVMe" in text) == (folder is None)
    assert max(map(len, text.splitlines())) <= 80  # a terminal breaks none of them


def candidate_of(memory: Memory) -> Candidate:
    return Candidate(SWAPPED, memory, Time(1.0, 0.0, 0.0, {}), 1.0, 0.5, 0.5, None, None, None)


def test_bars_are_as_long_as_the_peak_that_is_told() -> None:
    """Whichever is more, a step, loading or saving; what is below a megabyte is not told."""
    kinds = {"parameters": 6 * 10**9, "communication": 28, "reserved": 10**9}
    step = candidate_of(Memory(kinds, loading=10**9))
    loaded = candidate_of(Memory(kinds, loading=12 * 10**9, saving=8 * 10**9, saving_host=10**9))
    saved = candidate_of(Memory(kinds, saving=12 * 10**9, host=2 * 10**9, nvme=10**9))
    assert kinds_of([step]) == ["parameters", "reserved"]
    assert kinds_of([step, loaded]) == ["parameters", "reserved", "loading"]
    assert saved.memory.peak_kinds["saving"] == pytest.approx(6 * 10**9)
    for x, peak in ((step, 7), (loaded, 13), (saved, 13)):
        assert sum(x.memory.peak_kinds.values()) == x.memory.peak == x.to_dict()["peak_bytes"]
        assert x.memory.peak == pytest.approx(peak * 10**9)
        assert sum(widths(x, 26 * 10**9, BAR).values()) == round(BAR * peak / 26)
    told = loaded.to_dict()
    assert (told["loading_bytes"], told["saving_bytes"]) == (12 * 10**9, 8 * 10**9)
    assert (told["host_memory_bytes"], told["host_peak_bytes"]) == (0, 10**9)
    assert [elsewhere(x) for x in (loaded, saved)] == [
        "",
        "2.0 GB of host memory and 1.0 GB of NVMe",
    ]
