"""What ranks send each other in a step is what theory says of their layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import CPU, LENGTH, VOCABULARY, batch_of, config_of, model_of, part_of
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore

from ranks import Ranks
from rostra.batch import Batch
from rostra.build import build_engine
from rostra.events import Events
from rostra.layout import Layout
from rostra.parallel import replicated
from rostra.parallel.communication import Sizes, count_communication, expected
from rostra.train import train_step
from support import REPOSITORY

CHUNK = 24  # does not divide the positions of a micro batch
BUCKET_BYTES = 20_000  # several buckets even here
PAGE = REPOSITORY / "docs" / "communication.md"
Counts = dict[str, tuple[int, int]]

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"replicate": 2},
    "zero1": {"shard": 2, "sharding": "zero1"},
    "zero1, replicated": {"shard": 2, "replicate": 2, "sharding": "zero1"},
    "shard_grad_op": {"shard": 2, "sharding": "shard_grad_op"},
    "full_shard": {"shard": 2, "sharding": "full_shard"},
    "hybrid_shard": {"shard": 2, "replicate": 2, "sharding": "hybrid_shard"},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "gpipe": {"pipeline": 2, "pipeline_schedule": "gpipe"},
    "1f1b": {"pipeline": 2, "pipeline_schedule": "1f1b"},
    "interleaved_1f1b": {"pipeline": 2, "pipeline_schedule": "interleaved_1f1b", "stages": 2},
    "zero_bubble": {"pipeline": 2, "pipeline_schedule": "zero_bubble", "stages": 2},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp, reduced in bf16": ("llama", {"replicate": 2, "reduction": "bf16"}),
    "zero1, bf16 weights": ("llama", {"shard": 2, "sharding": "zero1", "compute": "bf16_pure"}),
    "full_shard, bf16": ("llama", {"shard": 2, "sharding": "full_shard", "compute": "bf16"}),
    "full_shard, all recomputed": (
        "llama",
        {"shard": 2, "sharding": "full_shard", "activation_checkpointing": "full"},
    ),
    "full_shard over context": ("llama", {"context": 2, "sharding": "full_shard"}),
    "ring of four": ("llama", {"context": 4, "context_method": "ring"}),
    "ring of two": (
        "gemma3",
        {"context": 2, "context_method": "ring", "sharding": "full_shard"},
    ),
    "zero1 x context": ("llama", {"shard": 2, "context": 2, "sharding": "zero1"}),
    "four ranks, padded": ("llama", {"shard": 4, "sharding": "full_shard"}),
    "more ranks than heads of keys": ("llama", {"context": 4}),
    "tied embeddings in two stages": ("gemma3", {"pipeline": 2, "pipeline_schedule": "1f1b"}),
    "four stages": ("llama", {"pipeline": 4, "pipeline_schedule": "gpipe"}),
}


def layout_of(given: dict[str, Any]) -> Layout:
    return Layout(**{"micro_batch": 2, "accumulation": 2, **given})


def full_batch(samples: int) -> Batch:
    batch = batch_of(1, samples)
    return Batch(batch.input_ids, batch.input_ids.roll(-1, 1), batch.position_ids)


def counts(step: Any) -> Counts:
    return {kind: (found.number, found.bytes) for kind, found in step.items()}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated, "BUCKET_BYTES", BUCKET_BYTES)


def counted(architecture: str, layout: Layout) -> tuple[int, Counts]:
    """This rank's place along the pipeline, and what it sends in the second step."""
    before, replicated.BUCKET_BYTES = replicated.BUCKET_BYTES, BUCKET_BYTES
    samples = layout.data * layout.micro_batch * layout.accumulation
    config = config_of(train={"global_batch_size": samples, "loss_chunk": CHUNK})
    try:
        engine = build_engine(config, layout, model_of(architecture), CPU, 10, Events())
    finally:
        replicated.BUCKET_BYTES = before
    batch = part_of(full_batch(samples), engine)
    train_step(engine, batch)
    with count_communication() as step:
        train_step(engine, batch)
    return engine.mesh.coordinate("pipeline"), counts(step)


def check(ranks: Ranks, architecture: str, layout: Layout) -> Counts:
    """What rank 0 sends; all ranks send what theory says."""
    sizes = Sizes.of(model_of(architecture), LENGTH, CHUNK)
    found = ranks.run(layout.world_size, counted, architecture, layout)
    for place, each in found:
        assert each == counts(expected(layout, sizes, place, gloo=True))
    return found[0][1]


@pytest.mark.parametrize("name", STRATEGIES)
def test_counted_is_expected_and_what_the_page_says(ranks: Ranks, name: str) -> None:
    found = check(ranks, "llama", layout_of(STRATEGIES[name]))
    (row,) = re.findall(rf"^\| {name} \| \d.*$", PAGE.read_text(), re.MULTILINE)
    written = re.findall(r"([\d,]+) ([a-z-]+) \(([\d,]+)\)", row)
    said = {kind: (_number(number), _number(sent)) for number, kind, sent in written}
    assert said == {kind: each for kind, each in found.items() if kind != "scalar"}


def _number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(ranks: Ranks, name: str) -> None:
    architecture, given = VARIANTS[name]
    check(ranks, architecture, layout_of(given))


def primitives() -> dict[str, Counts]:
    """Each kind of call alone, of 6 float32 and over two ranks."""
    rank, x = dist.get_rank(), torch.ones(6)
    parts, alone = (
        [torch.empty(6), torch.empty(6)],
        dist.new_group([rank], use_local_synchronization=True),
    )
    group = dist.group.WORLD
    assert group is not None

    def exchange() -> None:
        other, got = 1 - rank, torch.empty(6)
        ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, got, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def backward() -> None:
        leaf = torch.ones(6, requires_grad=True)
        all_to_all_single_autograd(leaf, None, None, group).sum().backward()

    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(6)),
        "all_reduce of 5": lambda: dist.all_reduce(torch.ones(5)),
        "functional all_reduce": lambda: all_reduce(x, "sum", group),
        "scalar": lambda: dist.all_reduce(torch.ones(())),
        "all_gather": lambda: dist.all_gather(parts, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(12), x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(3), x),
        "backward": backward,
        "exchange": exchange,
        "broadcast": lambda: dist.broadcast(torch.ones(6), 0),
        "alone": lambda: dist.all_reduce(torch.ones(6), group=alone),
    }
    found = {}
    for name, call in calls.items():
        with count_communication() as step:
            call()
        found[name] = counts(step)
    return found


def test_each_call_is_seen_once(ranks: Ranks) -> None:
    for found in ranks.run(2, primitives):
        assert found == {
            "all_reduce": {"all-reduce": (1, 24)},
            "all_reduce of 5": {"all-reduce": (1, 24)},
            "functional all_reduce": {"all-reduce": (1, 24)},
            "scalar": {"scalar": (1, 8)},
            "all_gather": {"all-gather": (1, 24)},
            "all_gather_into_tensor": {"all-gather": (1, 24)},
            "reduce_scatter_tensor": {"reduce-scatter": (1, 12)},
            "backward": {"all-to-all": (2, 24)},
            "exchange": {"send": (1, 24)},
            "broadcast": {"broadcast_": (1, 24)},
            "alone": {},
        }


@pytest.fixture
def sixteen() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("shard", [16, 4])
def test_a_large_world_in_one_process(sixteen: None, shard: int) -> None:
    """Nothing is sent, and all is counted; 98 rows over 16 ranks are padded to 112."""
    sharding = "full_shard" if shard == 16 else "hybrid_shard"
    layout = layout_of({"shard": shard, "replicate": 16 // shard, "sharding": sharding})
    _, found = counted("llama", layout)
    assert found == counts(expected(layout, Sizes.of(model_of("llama"), LENGTH, CHUNK)))
    if shard == 16:  # a layer of 9,280 numbers in 580, and 2 x 7 rows of 32 with a norm's 2
        assert found["all-gather"] == (18, 15 * 4 * 2 * (2 * 4 * 580 + 450))


REFUSED: list[dict[str, Any]] = [
    {"shard": 2, "tensor": 2, "sharding": "full_shard"},
    {"replicate": 2, "engine": "deepspeed"},
    {"tensor": 2, "compute": "bf16"},
    {"context": 2, "activation_checkpointing": "full"},
]


@pytest.mark.parametrize("given", REFUSED)
def test_no_closed_form_is_said(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no closed form"):
        expected(layout_of(given), Sizes.of(model_of("llama"), LENGTH, CHUNK))


def test_one_process_sends_nothing() -> None:
    assert expected(layout_of({}), Sizes.of(model_of("llama"), LENGTH, CHUNK)) == {}


def test_the_leading_terms() -> None:
    """With P parameters: 2P numbers, 2P under zero1, 2P and 3P a micro batch where sharded
    (ZeRO, arXiv:1910.02054, section 7), for many ranks."""
    sizes, ranks = Sizes.of(model_of("llama"), LENGTH, CHUNK), 2
    p = sum(x.numel() for x in model_of("llama").parameters()) * 4 * (ranks - 1) / ranks

    def sent(**given: Any) -> float:
        found = expected(layout_of({"accumulation": 1, **given}), sizes)
        return sum(x.bytes for kind, x in found.items() if kind != "scalar")

    assert sent(replicate=2) == 2 * p
    assert sent(shard=2, sharding="zero1") == 2 * p
    assert sent(shard=2, sharding="shard_grad_op") == 2 * p
    rest = 4 * (2 * VOCABULARY * 32 + 32) * (ranks - 1) / ranks  # gathered once
    assert sent(shard=2, sharding="full_shard") == 3 * p - rest
