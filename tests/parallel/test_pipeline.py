"""Pipelines of stages give one process's loss and gradients, whatever the schedule."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from ranks import Ranks
from rostra.batch import IGNORE, Batch
from rostra.errors import RequestError
from rostra.layout import Layout
from rostra.models import create_model, decoder_layers, evaluating
from rostra.models.weights import model_on_meta
from rostra.optim.losses import chunked_cross_entropy
from rostra.parallel.activations import checkpoint_activations
from rostra.parallel.held import local
from rostra.parallel.mesh import DATA, Mesh
from rostra.parallel.pipeline import Pipeline, check_pipeline
from rostra.parallel.pipeline_split import (
    balance,
    check_stages,
    layer_costs,
    own_layers,
    split_layers,
    tied_aliases,
    tied_weight,
)
from rostra.parallel.replicated import Buckets
from rostra.parallel.sharded import shard
from rostra.parallel.stage import Stage
from rostra.parallel.tensor import split_tensors, vocabulary_shard

CPU = torch.device("cpu")
VOCABULARY, LENGTH = 97, 16
KINDS = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 20.0,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
}


def model_of(kind: str, layers: int = 4) -> PreTrainedModel:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if kind == "gpt2":
        del values["head_dim"], values["intermediate_size"]
    model = create_model(AutoConfig.for_model(kind, **(values | KINDS[kind])), 1, "sdpa")
    return model.train()


def parts_of(count: int, seed: int = 0) -> list[Batch]:
    """Micro batches of two samples, with very unequal targets and documents that end inside."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2 * count, LENGTH + 1), generator=generator)
    labels, positions = tokens[:, 1:].clone(), torch.arange(LENGTH).repeat(2 * count, 1)
    for row in range(2 * count):
        labels[row, : row * LENGTH // (2 * count)] = IGNORE
        positions[row, 3 + row % 9 :] -= 3 + row % 9
    labels[-2:] = IGNORE  # a micro batch without any target
    whole = Batch(tokens[:, :-1].contiguous(), labels, positions)
    return list(whole.micro_batches(2))


def inputs(batch: Batch) -> tuple[dict[str, Any], Batch]:
    ids = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    return {**ids, "use_cache": False}, batch


def loss(
    model: PreTrainedModel, arguments: dict[str, Any], batch: Batch, factor: float
) -> tuple[Tensor, Tensor]:
    hidden = model.base_model(**arguments).last_hidden_state
    softcap = getattr(model.config, "final_logit_softcapping", None)
    weight, vocabulary = vocabulary_shard(model.get_output_embeddings().weight)
    return chunked_cross_entropy(
        hidden,
        weight,
        batch.labels,
        scale=factor,
        chunk=20,
        softcap=softcap,
        vocabulary=vocabulary,
    )


def gradients_of(model: PreTrainedModel, alias: dict[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        whole = parameter.grad
        found[alias.get(name, name)] = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return found


def one_process(
    kind: str, layers: int, parts: list[Batch], factor: float
) -> tuple[float, dict[str, Tensor]]:
    stage = Stage(model_of(kind, layers), loss, inputs)
    stage.begin(factor)
    for part in parts:
        stage(**part.tensors()).backward()
    return float(stage.sum(CPU)), gradients_of(stage.model, {})


def stages_of(kind: str, layers: int, layout: Layout, mesh: Mesh) -> list[Stage]:
    whole = model_of(kind, layers)
    count = layout.pipeline * layout.stages
    cuts = balance(layer_costs(whole), count)
    stages = []
    for index in range(mesh.coordinate("pipeline"), count, layout.pipeline):
        model = copy.deepcopy(whole)
        split_layers(model, index, count, cuts)
        if layout.tensor > 1:
            split_tensors(model, mesh.part("tensor"), last=index == count - 1)
        stages.append(Stage(model, loss, inputs, index == 0, index == count - 1))
    return stages


def own_gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else local(parameter.grad)


def train(
    kind: str, layers: int, layout: Layout, factor: float, recompute: bool = False
) -> tuple[list[float], float, list[dict[str, Tensor]]]:
    """Two runs forward and backward, and one forward alone; the second run's gradients."""
    mesh = Mesh.of(layout, CPU)
    stages = stages_of(kind, layers, layout, mesh)
    for stage in stages:
        if recompute:
            split = layout.pipeline_schedule == "zero_bubble"
            checkpoint_activations(stage.model, "full", split)
        if layout.sharding != "no_shard":
            shard(stage, own_layers(stage.model), mesh, layout)
    pipeline = Pipeline(stages, mesh, own_gradient)
    share = mesh.coordinate(*DATA)
    parts = parts_of(layout.accumulation * layout.data)
    own = parts[share * layout.accumulation : (share + 1) * layout.accumulation]

    def run(backward: bool) -> float:
        for stage in stages:
            stage.zero_grad()
            stage.begin(factor)
        pipeline(own, backward)
        return float(mesh.sum(sum(stage.sum(CPU) for stage in stages), "pipeline", *DATA))

    totals = [run(True), run(True)]
    gradients = [gradients_of(s.model, tied_aliases(s.model)) for s in stages]
    with evaluating(*stages):
        evaluated = run(False)
    return totals, evaluated, gradients


def check_against_one_process(
    ranks: Ranks, kind: str, layers: int, layout: Layout, recompute: bool = False
) -> None:
    factor = 1 / 37
    expected, wanted = one_process(
        kind, layers, parts_of(layout.accumulation * layout.data), factor
    )
    seen = set()
    for totals, evaluated, gradients in ranks.run(
        layout.world_size, train, kind, layers, layout, factor, recompute
    ):
        for total in (*totals, evaluated):
            assert total == pytest.approx(expected, rel=1e-6)
        for name, gradient in itertools.chain(*(found.items() for found in gradients)):
            seen.add(name)
            assert torch.allclose(gradient, wanted[name], atol=1e-5, rtol=1e-5), name
    assert seen == wanted.keys()


def layout_of(schedule: Any, stages: int = 1, pipeline: int = 2, **other: Any) -> Layout:
    return Layout(
        2, **({"accumulation": 4, "pipeline": pipeline} | other), pipeline_schedule=schedule,
        stages=stages,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zero_bubble", 2)],
)
@pytest.mark.parametrize(("kind", "layers"), [("llama", 5), ("gemma3_text", 4)])
def test_every_schedule_equals_one_process(
    ranks: Ranks, kind: str, layers: int, schedule: str, stages: int
) -> None:
    check_against_one_process(ranks, kind, layers, layout_of(schedule, stages))


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_other_families_equal_one_process(ranks: Ranks, kind: str) -> None:
    check_against_one_process(ranks, kind, 3, layout_of("1f1b", accumulation=3))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_four_stages_on_four_ranks(ranks: Ranks, schedule: str) -> None:
    check_against_one_process(ranks, "gemma3_text", 4, layout_of(schedule, pipeline=4))


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2)]
)
def test_with_sharded_stages(ranks: Ranks, schedule: str, stages: int) -> None:
    layout = layout_of(schedule, stages, accumulation=2, shard=2, sharding="full_shard")
    check_against_one_process(ranks, "gemma3_text", 4, layout)


def train_replicated(layout: Layout, factor: float) -> dict[str, Tensor]:
    mesh = Mesh.of(layout, CPU)
    stages = stages_of("gemma3_text", 4, layout, mesh)
    found = []
    for stage in stages:
        alias = tied_aliases(stage.model)
        found += [(alias.get(name, name), p) for name, p in stage.model.named_parameters()]
        stage.begin(factor)
    buckets = Buckets(found, mesh, sharded=False)
    share, count = mesh.coordinate(*DATA), layout.accumulation
    own = parts_of(count * layout.data)[share * count : (share + 1) * count]
    Pipeline(stages, mesh, buckets.so_far)(own, backward=True)
    buckets.collect()
    return {held.name: held.value.grad for held in buckets.held if held.value.grad is not None}


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2)]
)
def test_with_replicated_stages(ranks: Ranks, schedule: str, stages: int) -> None:
    layout = layout_of(schedule, stages, accumulation=2, replicate=2)
    _, wanted = one_process("gemma3_text", 4, parts_of(4), 1 / 37)
    seen = set()
    for gradients in ranks.run(4, train_replicated, layout, 1 / 37):
        for name, gradient in gradients.items():
            seen.add(name)
            assert torch.allclose(gradient, wanted[name], atol=1e-5, rtol=1e-5), name
    assert seen == wanted.keys()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_with_tensors_split(ranks: Ranks, schedule: str) -> None:
    layout = layout_of(schedule, accumulation=2, tensor=2)
    check_against_one_process(ranks, "gemma3_text", 4, layout)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("other", [{}, {"shard": 2, "sharding": "full_shard"}])
def test_with_recomputed_layers(ranks: Ranks, schedule: str, other: dict[str, Any]) -> None:
    layout = layout_of(schedule, accumulation=2, **other)
    check_against_one_process(ranks, "llama", 4, layout, recompute=True)


@pytest.mark.parametrize(
    ("schedule", "stages", "accumulation"),
    [
        ("gpipe", 1, 1),
        ("interleaved_1f1b", 2, 1),
        ("interleaved_1f1b", 2, 6),
        ("zero_bubble", 2, 1),
    ],
)
def test_few_and_many_micro_batches(
    ranks: Ranks, schedule: str, stages: int, accumulation: int
) -> None:
    layout = layout_of(schedule, stages, accumulation=accumulation)
    check_pipeline(layout, 4)
    check_against_one_process(ranks, "llama", 4, layout)


def evaluate(layout: Layout, sizes: list[int]) -> float:
    mesh = Mesh.of(layout, CPU)
    stages = stages_of("gemma3_text", 4, layout, mesh)
    for stage in stages:
        stage.begin(1.0)
    parts = [part.rows(0, size) for part, size in zip(parts_of(len(sizes)), sizes, strict=True)]
    Pipeline(stages, mesh, own_gradient)(parts, backward=False)
    return float(mesh.sum(sum(stage.sum(CPU) for stage in stages), "pipeline"))


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_forward_alone_takes_micro_batches_of_any_number_and_shape(
    ranks: Ranks, schedule: str, stages: int
) -> None:
    sizes = [2, 1, 2, 2, 1]
    parts = [part.rows(0, size) for part, size in zip(parts_of(len(sizes)), sizes, strict=True)]
    expected, _ = one_process("gemma3_text", 4, parts, 1.0)
    for total in ranks.run(2, evaluate, layout_of(schedule, stages), sizes):
        assert total == pytest.approx(expected, rel=1e-6)


def test_two_copies_of_a_tied_embedding_have_one_gradient(ranks: Ranks) -> None:
    answers = ranks.run(2, train, "gemma3_text", 4, layout_of("1f1b"), 1.0)
    name = "model.embed_tokens.weight"
    first, last = (found[name] for _, _, (found,) in answers)
    assert torch.equal(first, last)


def train_autocast(layout: Layout) -> tuple[float, dict[str, Tensor]]:
    mesh = Mesh.of(layout, CPU)
    (stage,) = stages_of("llama", 4, layout, mesh)
    stage.begin(1.0)
    with torch.autocast("cpu", torch.bfloat16):
        Pipeline([stage], mesh, own_gradient)(parts_of(layout.accumulation), backward=True)
    return float(mesh.sum(stage.sum(CPU), "pipeline")), gradients_of(stage.model, {})


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_under_autocast(ranks: Ranks, schedule: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected, wanted = one_process("llama", 4, parts_of(4), 1.0)
    for total, gradients in ranks.run(2, train_autocast, layout_of(schedule, compute="bf16")):
        assert total == pytest.approx(expected, rel=1e-5)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            assert torch.allclose(gradient, wanted[name], rtol=1e-2, atol=1e-2), name


def test_a_stage_on_meta_keeps_the_names_of_the_whole_model() -> None:
    whole = model_on_meta(model_of("gemma3_text").config)
    names = [{n for n, _ in whole.named_parameters()}]
    stages = [copy.deepcopy(whole) for _ in range(3)]
    for index, stage in enumerate(stages):
        split_layers(stage, index, 3, [0, 1, 2, 4])
        alias = tied_aliases(stage)
        names.append({alias.get(n, n) for n, _ in stage.named_parameters()})
        assert all(p.is_meta for p in stage.parameters())
    assert names[0] == names[1] | names[2] | names[3]
    assert [len(own_layers(stage)) for stage in stages] == [1, 1, 2]
    assert [len(decoder_layers(stage)) for stage in stages] == [4, 4, 4]
    assert [tied_weight(stage) is None for stage in stages] == [False, True, False]
    assert tied_aliases(stages[0]) == {}
    assert tied_aliases(stages[2]) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_families_whose_parts_are_not_the_whole_are_refused() -> None:
    with pytest.raises(RequestError, match=r"parallel\.pipeline: a opt model cannot be cut"):
        check_stages(AutoConfig.for_model("opt"))
    with pytest.raises(RequestError, match=r"parallel\.pipeline: a mamba model cannot be cut"):
        check_stages(AutoConfig.for_model("mamba"))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "qwen3_moe"])
def test_known_families_can_be_cut_at_any_size(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    before = config.to_dict()
    check_stages(config)
    assert config.to_dict() == before


costs_and_stages = st.lists(st.integers(1, 9), min_size=1, max_size=8).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


@given(costs_and_stages)
def test_balance_is_the_best_of_all_cuts(given_: tuple[list[int], int]) -> None:
    costs, stages = given_

    def worth(cuts: tuple[int, ...]) -> tuple[int, int]:
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(cuts)]
        return max(sums), sum(x * x for x in sums)

    inner = itertools.combinations(range(1, len(costs)), stages - 1)
    found = balance(costs, stages)
    assert found[0] == 0 and found[-1] == len(costs) and len(found) == stages + 1
    assert worth(tuple(found)) == min(worth((0, *cuts, len(costs))) for cuts in inner)


def test_the_head_counts_where_layers_are_divided() -> None:
    model = model_of("llama", 5)
    costs = layer_costs(model)
    assert costs[:4] == [costs[0]] * 4
    assert costs[4] - costs[0] == 6 * VOCABULARY * 32
    assert balance(costs, 2) == [0, 3, 5]
    assert balance([1, 1, 1, 6], 2) == [0, 3, 4]
    with pytest.raises(RequestError, match="at most 5 work"):
        balance(costs, 6)


def test_experts_count_as_far_as_a_token_meets_them() -> None:
    model = model_of("mixtral", 2)
    experts = sum(
        p.numel() for n, p in decoder_layers(model)[0].named_parameters() if ".experts." in n
    )
    every = sum(p.numel() for p in decoder_layers(model)[0].parameters())
    assert layer_costs(model)[0] == 6 * (every - experts / 2)


@pytest.mark.parametrize(
    ("layout", "layers", "message"),
    [
        (layout_of("1f1b", pipeline=8), 6, r"8 stages for 6 layers.*parallel\.pipeline: 6"),
        (layout_of("zero_bubble", 2, pipeline=4), 6, r"8 stages for 6 .*parallel\.pipeline: 3"),
        (layout_of("1f1b", pipeline=6), 6, r"has 4 micro batches.*nearest that works is 6"),
        (layout_of("zero_bubble", pipeline=3, accumulation=7), 6, r"has 7.*that works is [68]"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(layout: Layout, layers: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_pipeline(layout, layers)


def test_what_a_schedule_can_run_is_not_refused() -> None:
    for layout in (
        layout_of("gpipe", pipeline=4, accumulation=1),
        layout_of("1f1b", accumulation=3),
        layout_of("interleaved_1f1b", 3, accumulation=1),
        layout_of("zero_bubble", 2, pipeline=3, accumulation=8),
        Layout(1, 1),
    ):
        check_pipeline(layout, 12)
