"""The time model: physics that must hold whatever the constants, and published throughput."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import defaultdict
from dataclasses import replace
from math import isclose
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rostra.config import Config
from rostra.hardware.catalogue import device_names, read_cluster
from rostra.hardware.cluster import Cluster
from rostra.layout import Layout
from rostra.models import find_shape
from rostra.plan.conventions import Conventions
from rostra.plan.efficiency import Efficiency, typical
from rostra.plan.job import Job, job_of
from rostra.plan.memory import MemoryModel
from rostra.plan.results import Time
from rostra.plan.time import TimeModel, hardware_flops, model_flops
from rostra.plan.time.collectives import group
from rostra.plan.time.work import Work

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "../shared/data/published"
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def config(length: int, batch: int = 8, isolate_documents: bool = False, **given: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"pretrained": "none"},
            "data": {
                "sources": [{"type": "text", "path": "none"}],
                "sequence_length": length,
                "isolate_documents": isolate_documents,
            },
            "train": {"steps": 1, "global_batch_size": batch, "loss_chunk": 4096},
            **given,
        }
    )


def job(length: int = 8192, batch: int = 64, family: str = "llama", **given: Any) -> Job:
    """Llama 3 8B, or what `given` makes of it: sections of the config, sizes of the model."""
    sections = {k: given.pop(k) for k in ("adapter", "quantization", "train") if k in given}
    sizes = given if family != "llama" else LLAMA | given
    return job_of(config(length, batch, **sections), AutoConfig.for_model(family, **sizes))


def timed(
    layout: Layout, hardware: str | Cluster = "8xH100", of: Job | None = None, **given: Any
) -> Time:
    cluster = read_cluster(hardware) if isinstance(hardware, str) else hardware
    return TimeModel(of or job(), cluster, **given)(layout)


SHARDED = Layout(1, 8, shard=8, sharding="full_shard", compute="bf16")
SINGLE = Layout(1, 64, compute="bf16")


def test_every_device_of_the_catalogue_has_its_curves() -> None:
    for name in device_names():
        device = read_cluster(name).device
        found = typical(device)
        assert Efficiency.from_dict(found.to_dict()) == found, name
        precision = (
            "bf16" if "bf16" in device.flops else "fp16" if "fp16" in device.flops else "fp32"
        )
        shares = [found.product(precision)(size) for size in range(10, 50)]
        assert shares == sorted(shares), name
        assert 0 < shares[-1] <= 1, name


def test_activations_that_wait_on_the_host_cross_its_link_twice() -> None:
    """Those that memory counts there, over a link too slow to hide anything behind computing."""
    cluster = read_cluster("8xH100")
    slow = replace(cluster.node.host_link, bandwidth=1e6)
    cluster = replace(cluster, node=replace(cluster.node, host_link=slow))
    layout = replace(SHARDED, activation_checkpointing="offload")
    host = MemoryModel(job(), cluster)(layout).host
    crossing = 2 * layout.accumulation * host / 1e6 / typical(cluster.device).host
    assert isclose(timed(layout, cluster).offload, crossing, rel_tol=0.02)


def test_the_parts_make_the_step() -> None:
    layout = Layout(
        2, 4, shard=2, tensor=2, pipeline=2, pipeline_schedule="1f1b", sharding="full_shard",
        compute="bf16", activation_checkpointing="full",
    )  # fmt: skip
    found = timed(layout)
    parts = [
        found.compute, found.memory, found.recompute, found.bubble, found.offload,
        found.optimizer, found.overhead, *found.communication.values(),
    ]  # fmt: skip
    assert isclose(sum(parts), found.step)
    assert set(found.communication) == {"shard", "tensor", "pipeline"}
    assert min(parts) >= 0


def test_twice_the_micro_batches_take_twice_as_long_but_for_the_optimizer() -> None:
    once, twice = timed(SHARDED), timed(replace(SHARDED, accumulation=16))
    assert isclose(twice.step - twice.optimizer, 2 * (once.step - once.optimizer), rel_tol=1e-6)
    assert twice.optimizer == once.optimizer


def test_operations_are_those_of_palms_appendix() -> None:
    of = job(2048, 1)
    layers, width, tokens = 32, 4096, 2048
    matrices = of.sizes.parameters - of.sizes.embedding - layers * 2 * width - width
    assert isclose(model_flops(of, SINGLE), tokens * (6 * matrices + 12 * layers * width * tokens))
    assert isclose(
        model_flops(of, SINGLE, causal=True),
        tokens * (6 * matrices + 6 * layers * width * tokens),
    )


@pytest.mark.parametrize(
    ("mode", "least", "most"), [("none", 1, 1), ("full", 1.25, 1.34), ("every:2", 1.12, 1.17)]
)
def test_checkpointing_adds_what_it_repeats(mode: str, least: float, most: float) -> None:
    layout = replace(SHARDED, activation_checkpointing=mode)
    ratio = hardware_flops(job(), layout) / model_flops(job(), layout)
    assert least <= ratio <= most
    assert timed(layout).step <= timed(SHARDED).step * most * 1.02
    assert (timed(layout).recompute > 0) == (mode != "none")


def test_a_pipeline_waits_as_its_schedule_has_it() -> None:
    def waits(schedule: Any, micro_batches: int, stages: int = 1) -> float:
        layout = Layout(
            1, micro_batches, pipeline=4, pipeline_schedule=schedule, stages=stages, compute="bf16"
        )
        found = timed(layout, of=job(2048, micro_batches))
        return found.bubble / (found.step - found.optimizer - found.communication["pipeline"])

    for schedule in ("gpipe", "1f1b"):  # Narayanan et al. 2021: (p - 1) / (m + p - 1)
        assert waits(schedule, 8) == pytest.approx(3 / 11, rel=0.02)
        assert waits(schedule, 32) == pytest.approx(3 / 35, rel=0.02)
    assert waits("interleaved_1f1b", 32, 2) < 0.6 * waits("1f1b", 32)
    assert waits("zero_bubble", 32) < 0.7 * waits("1f1b", 32)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (4, 2), (4, 4), (8, 4)])
def test_ranks_of_a_pipeline_do_the_whole_models_work(ranks: int, stages: int) -> None:
    schedule: Any = "interleaved_1f1b" if stages > 1 else "1f1b"
    layout = Layout(
        1, 32, pipeline=ranks, stages=stages, pipeline_schedule=schedule, compute="bf16"
    )
    one, cut = timed(replace(SINGLE, accumulation=32)), timed(layout)
    work, whole = cut.compute + cut.memory, one.compute + one.memory
    assert 0.999 * whole < ranks * work < 1.6 * whole


def test_a_ring_sends_the_least_and_a_tree_waits_the_least() -> None:
    cluster = read_cluster("2x8xH100")
    exact = replace(typical(cluster.device), link=1.0, network=1.0)
    inside = group(cluster, exact, 8, 1)
    large = 1e10
    assert inside.all_gather(large) == pytest.approx(7 / 8 * large / 450e9, rel=0.01)
    assert inside.all_reduce(large) == pytest.approx(2 * inside.all_gather(large))
    both = group(cluster, exact, 16, 1)  # eight adapters side by side
    assert both.bandwidth == pytest.approx(8 * 50e9)
    lone = group(cluster, exact, 2, 8)  # one rank of each node
    assert lone.bandwidth == pytest.approx(50e9)
    many = group(read_cluster("128x8xH100"), exact, 1024, 1)
    assert many.all_reduce(1024) < 2 * many.all_gather(1024) / 10


def test_more_nodes_take_longer_to_go_around() -> None:
    times = []
    for nodes in (1, 4, 32, 512):
        layout = replace(SHARDED, shard=8 * nodes, accumulation=1)
        times.append(timed(layout, f"{nodes}x8xH100", job(batch=8 * nodes)).step)
    assert times == sorted(times)
    assert times[2] < 1.2 * times[0] < times[3]


def test_tensor_parallelism_wants_the_links_of_a_node() -> None:
    layout = Layout(8, 1, tensor=8, compute="bf16")
    near, far = timed(layout, "8xH100"), timed(layout, "8x1xH100")
    assert far.communication["tensor"] > 5 * near.communication["tensor"]
    asynchronous = timed(layout, conventions=Conventions(asynchronous=("tensor",)))
    assert asynchronous.communication["tensor"] < near.communication["tensor"] / 2


def test_what_is_gathered_hides_behind_enough_work() -> None:
    share = []
    for rows in (1, 64):
        layout = Layout(rows, 1, shard=16, sharding="full_shard", compute="bf16")
        found = timed(layout, "2x8xL4", job(512, 16 * rows))
        share.append(found.communication["shard"] / found.step)
    assert share[0] > 0.5
    assert share[1] < 0.35


def test_techniques_cost_what_they_should() -> None:
    lora = job(2048, adapter={"kind": "lora"})
    qlora = job(2048, adapter={"kind": "lora"}, quantization={"kind": "nf4"})
    alone = replace(SINGLE, activation_checkpointing="full")
    adapted = replace(alone, adapter="lora")
    full = timed(alone, "1xA100", job(2048))
    beside = timed(adapted, "1xA100", lora)
    quantised = timed(replace(adapted, quantization="nf4"), "1xA100", qlora)
    assert 0.6 * full.step < beside.step < full.step
    assert beside.step < quantised.step < 1.5 * beside.step
    assert beside.optimizer < full.optimizer / 50
    compiled = timed(replace(SHARDED, compile=True))
    assert compiled.step < timed(SHARDED).step
    eighth = timed(replace(SHARDED, compute="fp8", compile=True))
    assert compiled.step / 2 < eighth.step < compiled.step
    alone = Layout(1, 64, engine="deepspeed", sharding="full_shard", compute="bf16")
    away = timed(replace(alone, offload_parameters="cpu", offload_optimizer="cpu"), "1xA100")
    assert timed(alone, "1xA100").step < away.step
    assert not away.communication  # one rank, to which the host's link brings its parameters
    assert away.offload > 0
    second = replace(SHARDED, sharding="shard_grad_op")
    serial = timed(replace(second, engine="deepspeed")).communication["shard"]
    assert serial > 1.5 * timed(second).communication["shard"]
    host = timed(replace(SHARDED, offload_optimizer="cpu"))
    disk = timed(replace(SHARDED, offload_optimizer="nvme"))
    assert timed(SHARDED).step < host.step < disk.step


def test_devices_without_a_precision_compute_it_as_float32() -> None:
    on = {x: timed(replace(SINGLE, compute=x), "1xV100").compute for x in ("fp32", "bf16", "fp16")}
    assert on["fp16"] < on["bf16"] / 3
    assert on["bf16"] == pytest.approx(on["fp32"], rel=0.3)


def test_attention_counts_what_is_seen() -> None:
    def share(length: int, **sizes: Any) -> float:
        of = job(length, 8, **sizes)
        return timed(Layout(1, 8, compute="bf16"), of=of).compute / (8 * length)

    assert share(65536) > 2.5 * share(4096)
    windows = {"sliding_window": 4096, "family": "mistral", **LLAMA}
    assert share(65536, **windows) < 0.5 * share(65536)


def test_a_ring_by_blocks_is_slower_than_all_to_alls_with_a_fused_kernel() -> None:
    layout = Layout(1, 1, context=8, sharding="no_shard", compute="bf16")
    ring = replace(layout, context_method="ring")
    of = job(65536, 1)
    assert timed(ring, of=of).step > 2 * timed(layout, of=of).step
    fused = timed(ring, of=of, conventions=Conventions(fused_ring=True))
    assert fused.step == pytest.approx(timed(layout, of=of).step, rel=0.1)


def test_small_chunks_of_the_loss_cost_the_heads_gradient_again_and_again() -> None:
    few = job(8192, 8)
    many = job(8192, 8, train={"steps": 1, "global_batch_size": 8, "loss_chunk": 64})
    layout = Layout(1, 8, compute="bf16")
    assert timed(layout, "1xH100", few).step < 0.9 * timed(layout, "1xH100", many).step


def test_experts_cost_what_a_row_meets() -> None:
    sizes = {**LLAMA, "vocab_size": 32000}
    dense = timed(SINGLE, of=job(2048, family="mistral", **sizes))
    mixed = timed(
        SINGLE,
        of=job(2048, family="mixtral", num_local_experts=8, num_experts_per_tok=2, **sizes),
    )
    assert 1.5 * dense.compute < mixed.compute < 2.2 * dense.compute


def test_stages_of_experts_are_those_of_the_engine() -> None:
    """The model of time and that of memory see the layers that the engine gives a rank."""
    of = job_of(config(2048), find_shape("Qwen/Qwen3-30B-A3B"))
    alone = Layout(1, 8, compute="bf16", activation_checkpointing="full")
    staged = replace(alone, pipeline=8, pipeline_schedule="1f1b")
    most = timed(staged, of=of).recompute / timed(alone, of=of).recompute * of.sizes.depth
    assert most == pytest.approx(7)
    memory = MemoryModel(of, read_cluster("8xH100"))(staged)
    held = 7 * 4 * of.sizes.layers[0][0].numbers
    assert memory.kinds["parameters"] == pytest.approx(held, rel=1e-4)


def test_small_models_wait_for_their_host_unless_compiled() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
    small = job(512, 8, num_key_value_heads=4, **sizes)
    eager = timed(Layout(1, 8, compute="bf16"), "1xH100", small)
    compiled = timed(Layout(1, 8, compute="bf16", compile=True), "1xH100", small)
    assert eager.overhead > eager.compute
    assert compiled.overhead < eager.overhead / 2


# What only looks at a tensor, and what is counted as products and attention.
LOOKS = (
    "device view _unsafe_view t transpose permute expand slice unsqueeze squeeze detach alias "
    "select split as_strided unbind split_with_sizes empty empty_like where"
).split()
PRODUCTS = (
    "mm addmm bmm _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward"
).split()


class Moved(TorchDispatchMode):
    """Bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in (*LOOKS, *PRODUCTS) and not name.startswith("sym"):
            for x in tree_leaves((args, kwargs, result)):
                if isinstance(x, Tensor):
                    self.bytes += min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
        return result


def moved(shape: PretrainedConfig, length: int, layers: int) -> tuple[int, int]:
    """Bytes of the forward and backward pass of a model's layers, uncompiled, under autocast."""
    shape = copy.deepcopy(shape)
    shape.num_hidden_layers = layers
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").base_model
        with Moved() as forward, torch.autocast("cpu", torch.bfloat16):
            out = model(torch.zeros(1, length, dtype=torch.long), use_cache=False)[0]
        with Moved() as backward:
            out.backward(torch.ones_like(out))
    return forward.bytes, backward.bytes


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox"])
def test_pointwise_work_is_what_operations_move(family: str) -> None:
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 1000,
        "num_hidden_layers": 3,
    }
    drops = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout")
    shape = AutoConfig.for_model(family, **sizes, **dict.fromkeys(drops, 0.0))
    length = 2048
    of = job_of(config(length, isolate_documents=True), shape)
    layer = of.sizes.layers[0][0]
    told = Work(of, Conventions()).pointwise(layer, 1, stream=4, computed=2, merged=False)
    pairs = zip(moved(shape, length, 3), moved(shape, length, 2), strict=True)
    casts = 6 * layer.numbers  # of the weights, and of their gradients
    counted = [(more - less - casts) / length for more, less in pairs]
    assert told.forward == pytest.approx(counted[0], rel=0.1)
    assert told.backward == pytest.approx(counted[1], rel=0.1)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published tables are not here")
def test_published_throughput_is_foretold() -> None:
    path = ROOT / "benchmarks/published_throughput.py"
    spec = importlib.util.spec_from_file_location("published_throughput", path)
    assert spec is not None and spec.loader is not None
    published = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = published
    spec.loader.exec_module(published)
    errors: dict[str, list[float]] = defaultdict(list)
    for row in published.rows(PUBLISHED):
        errors[row.group].append(abs(row.error))
        errors["held out" if row.held_out else "chosen by"].append(abs(row.error))
    assert {name: mean(x) for name, x in errors.items() if mean(x) > 0.1} == {}
    assert sum(map(len, errors.values())) == 2 * 116
