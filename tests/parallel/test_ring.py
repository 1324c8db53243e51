"""Ring attention computes what one process computes, and every rank has the same to do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import Any

import pytest
import sequences
import torch
import torch.distributed as dist
from common import config_of as config_from
from common import difference, run
from sequences import LENGTH, SAMPLES, alone, assert_same, batch_of, model_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PretrainedConfig
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

from ranks import Ranks
from rostra.build import check_layout
from rostra.errors import RequestError
from rostra.models import decoder_layers
from rostra.parallel import ring as ring_module
from rostra.parallel.activations import checkpoint_activations
from rostra.parallel.communication import count_communication
from rostra.parallel.context import check_context
from rostra.parallel.ring import Ring, split_ring
from rostra.parallel.ring_blocks import first_keys, seen_blocks
from rostra.train.choose import choose_layout

FAMILIES = ["llama", "mistral", "gemma2", "gemma3_text", "gpt2"]
split = partial(sequences.split, split_ring)


def config_of(family: str, heads: int = 3, kv_heads: int = 1, dropout: float = 0.0) -> Any:
    """Three query heads on one key head: neither can be dealt out to two ranks."""
    return sequences.config_of(family, heads, kv_heads, dropout)


def agrees(family: str, block: int = 256) -> None:
    config, batch = config_of(family), batch_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ring_module._BLOCK, "cpu", block)
        for isolate in (True, False):
            assert_same(split(model_of(config), batch, isolate), alone(config, batch, isolate))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_equals_one_process(ranks: Ranks, size: int, family: str) -> None:
    ranks.run(size, agrees, family)


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_a_chunk_may_have_several_blocks(ranks: Ranks, family: str) -> None:
    ranks.run(2, agrees, family, 3)


def under_autocast() -> None:
    config, batch = config_of("llama"), batch_of()
    with count_communication() as sent:
        found = split(model_of(config), batch, True, autocast=True)
    assert_same(found, alone(config, batch, True), tolerance=0.05)
    part = SAMPLES * LENGTH // 2 * 2 * 8  # of keys and values
    assert sent["send"].bytes == 2 * part * (2 + 2 + 4)  # gradients travel in float32


def test_autocast_is_near_and_keys_travel_in_16_bits(ranks: Ranks) -> None:
    ranks.run(2, under_autocast)


def checkpointed(mode: str) -> None:
    config, batch = config_of("gemma3_text"), batch_of()
    model = model_of(config)
    checkpoint_activations(model, mode)
    assert_same(split(model, batch, True), alone(config, batch, True))


@pytest.mark.parametrize("mode", ["full", "selective:attention", "selective:operations", "offload"])
def test_layers_may_be_checkpointed(ranks: Ranks, mode: str) -> None:
    ranks.run(2, checkpointed, mode)


def compiled(mode: str) -> None:
    """Around the break there are graphs, made once; of a layer that is computed again, none."""
    config, batch, graphs = config_of("gemma3_text"), batch_of(), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = model_of(config)
    checkpoint_activations(model, mode)
    for layer in decoder_layers(model):
        layer.compile(dynamic=False, backend=backend)
    assert_same(split(model, batch, True), alone(config, batch, True))
    made = len(graphs)
    assert (made > 0) == (mode == "none")
    split(model, batch, True)
    assert len(graphs) == made


@pytest.mark.parametrize("mode", ["none", "full"])
def test_layers_may_be_compiled(ranks: Ranks, mode: str) -> None:
    ranks.run(2, compiled, mode)


class _Order(TorchDispatchMode):
    """Names of products and sends, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("bmm", "send"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def order() -> list[list[str]]:
    """Of one layer forward and backward, runs of a name counted once."""
    config = config_of("llama")
    config.num_hidden_layers = 1
    model = model_of(config)
    ring = split_ring(model, dist.group.WORLD)
    with _Order() as forward:
        hidden = model.base_model(**ring.inputs(batch_of(), True)).last_hidden_state
    with _Order() as backward:
        hidden.sum().backward()
    return [[x for x, _ in groupby(mode.names)] for mode in (forward, backward)]


def test_what_travels_is_sent_before_what_is_here_is_computed(ranks: Ranks) -> None:
    """Four ranks: keys and values hop three times; behind them, their gradients."""
    hop = ["send", "bmm"]
    for forward, backward in ranks.run(4, order):
        assert forward == hop * 3
        assert backward == [*hop * 4, "send"]


def sends() -> list[tuple[int, int]]:
    """Sends of two layers and their bytes: forward, backward."""
    batch, model = batch_of(), model_of(config_of("llama"))
    ring = split_ring(model, dist.group.WORLD)
    with count_communication() as forward:
        loss = model(**ring.inputs(batch, True)).logits.sum()
    with count_communication() as backward:
        loss.backward()
    assert set(forward) == set(backward) == {"send"}
    return [(x["send"].number, x["send"].bytes) for x in (forward, backward)]


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_sends_once_a_hop_forward_and_twice_backward(ranks: Ranks, size: int) -> None:
    """Keys and values of one head, not of the three that queries have."""
    hops = 2 * (size - 1)
    part = SAMPLES * LENGTH // size * 2 * 8 * 4
    assert ranks.run(size, sends) == [[(hops, hops * part), (2 * hops, 2 * hops * part)]] * size


def ring_of(size: int, rank: int) -> Ring:
    return Ring(group=None, size=size, rank=rank, config=None, masks=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 97, 98])  # 97: one key less, a block less
def test_no_block_is_computed_that_no_query_sees_and_ranks_have_equal_work(
    window: int | None,
) -> None:
    size, length = 4, 512
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        seen &= ~torch.ones(length, length, dtype=torch.bool).tril(-window)
    steps = torch.zeros(size, size, dtype=torch.int64)  # blocks by rank and hop
    left = seen.clone()
    for rank in range(size):
        own = ring_of(size, rank).part(torch.arange(length)[None])[0]
        for source in range(size):
            theirs = ring_of(size, source).part(torch.arange(length)[None])[0]
            for block in seen_blocks(size, rank, source, length // size, window, 16):
                assert own[block.rows].tolist() == list(block.queries)
                assert theirs[block.columns].tolist() == list(block.keys)
                there = slice(block.queries.start, block.queries.stop)
                keys = slice(block.keys.start, block.keys.stop)
                assert seen[there, keys].any()
                left[there, keys] = False
                steps[rank, (rank - source) % size] += 1
    assert not left.any()
    if window is None:
        assert (steps == steps[0]).all(), steps  # each rank as much, at each hop


def test_first_keys_are_those_of_the_whole_mask() -> None:
    """Of windows within documents, without ever making the mask of T x T."""
    batch = batch_of()
    documents = (batch.position_ids == 0).cumsum(1)
    window = sliding_window_causal_mask_function(6)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return window(b, h, q, k) & (documents[b, q] == documents[b, k])

    sizes = {"batch_size": SAMPLES, "q_length": LENGTH, "kv_length": LENGTH}
    whole = sdpa_mask(**sizes, mask_function=mask, allow_is_causal_skip=False)
    assert whole is not None
    found = first_keys(**sizes, mask_function=mask)
    assert found.dtype == torch.int32
    assert torch.equal(found[..., 0].long(), whole.int().argmax(-1))
    assert first_keys(**sizes).shape == (1, 1, 1, 1)


@cache
def one_process(architecture: str, compute: str) -> dict[str, Any]:
    return run(architecture, {"micro_batch": 8, "accumulation": 1, "compute": compute})


LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "four": {"context": 4},
    "full_shard over it": {"sharding": "full_shard"},
    "x full_shard": {"shard": 2, "sharding": "full_shard"},
    "x ddp": {"replicate": 2},
    "x tensor": {"tensor": 2},
    "x pipeline": {"pipeline": 2, "pipeline_schedule": "1f1b"},
    "x zero bubble": {"pipeline": 2, "pipeline_schedule": "zero_bubble", "stages": 2},
    "recomputed": {"activation_checkpointing": "full"},
    "bf16": {"compute": "bf16"},
}


# Neither tensor parallelism nor a split backward pass takes the projections of a gpt2.
CASES = [(name, x) for name in LAYOUTS for x in ("llama", "gemma3")]
CASES += [(name, "gpt2") for name in ("alone", "x full_shard", "x pipeline")]


@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_a_layout_equals_one_process(ranks: Ranks, name: str, architecture: str) -> None:
    layout = {
        "micro_batch": 2, "accumulation": 4, "context": 2, "context_method": "ring",
        **LAYOUTS[name],
    }  # fmt: skip
    half = layout.get("compute", "fp32") != "fp32"
    size = layout["context"]
    for axis in ("replicate", "shard", "tensor", "pipeline"):
        size *= layout.get(axis, 1)
    expected = one_process(architecture, layout.get("compute", "fp32"))
    for found in ranks.run(size, run, architecture, layout):
        assert found["tokens"] == expected["tokens"]
        assert found["evaluated"][1] == expected["evaluated"][1]
        assert abs(found["evaluated"][0] - expected["evaluated"][0]) < (2 if half else 1e-3)
        apart = difference(expected, found)
        assert apart["loss"] < (2e-2 if half else 1e-5), apart
        assert apart["norm"] < (5e-2 if half else 1e-4), apart
        assert apart["parameters"] < (2e-2 if half else 1e-4), apart


@pytest.mark.parametrize(
    ("config", "size", "length", "message"),
    [
        (config_of("llama"), 2, 30, r"data.sequence_length \(30\); set parallel.context: 1"),
        (config_of("llama"), 4, 20, r"parallel.context: 5$"),
        (config_of("llama", dropout=0.1), 2, 32, "dropout.*context_method: ulysses"),
        (config_of("gpt2", dropout=0.1), 2, 32, "dropout.*context_method: ulysses"),
        (AutoConfig.for_model("rwkv"), 2, 32, "without attention"),
        (AutoConfig.for_model("qwen3_next"), 2, 32, "linear_attention layers"),
    ],
)
def test_refuses_what_cannot_be_split(
    config: PretrainedConfig, size: int, length: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check_context(config, size, length, method="ring")


def test_is_what_works_when_heads_do_not_divide() -> None:
    with pytest.raises(RequestError, match=r"3 query heads; set parallel.context: 1, or .*: ring"):
        check_context(config_of("llama"), 2, 32)
    check_context(config_of("llama"), 2, 32, method="ring")
    with pytest.raises(RequestError, match=r"parallel.context: 1$"):
        check_context(config_of("llama"), 2, 30)


def test_the_config_chooses_it() -> None:
    config = config_from(parallel={"context": 2, "context_method": "ring"})
    layout = choose_layout(config, torch.device("cpu"), 1000, 1000, ranks=2)
    assert (layout.context, layout.context_method) == (2, "ring")
    with pytest.raises(RequestError, match="of a ring"):
        check_layout(config, replace(layout, context=16), config_of("llama", heads=16))
    one = config_from(parallel={"context_method": "ring"})
    assert choose_layout(one, torch.device("cpu"), 1000, 1000).context_method == "ulysses"


def refused(family: str) -> None:
    """Sinks of heads; no attention interface; a mask that looks ahead."""
    small = {"vocab_size": 9, "hidden_size": 32, "num_hidden_layers": 1, "pad_token_id": 0}
    if family == "gpt_oss":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        small |= heads | {"num_local_experts": 2, "intermediate_size": 8}
    config = AutoConfig.for_model(family, **small)
    config.use_bidirectional_attention = family == "gemma3_text"
    batch = replace(batch_of(), input_ids=torch.zeros(SAMPLES, LENGTH, dtype=torch.int64))
    with pytest.raises(RequestError, match=r"parallel\.context = 2"):
        model = model_of(config)
        model(**split_ring(model, dist.group.WORLD).inputs(batch, True))


@pytest.mark.parametrize("family", ["bloom", "mamba", "gpt_oss", "gemma3_text"])
def test_refuses_models_of_other_attention(ranks: Ranks, family: str) -> None:
    ranks.run(2, refused, family)
