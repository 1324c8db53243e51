"""Wrong requests for a layout: one message with the key and what to do, and nothing left
behind. And that what the table refuses does indeed not work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.common import batch_of, difference, model_of, run
from ranks import Ranks
from rostra import RequestError, Run
from rostra.build.check import check_layout
from rostra.config import Config, config_from_dict
from rostra.layout import Layout, refusals
from rostra.models import scratch_config
from rostra.parallel.activations import checkpoint_activations
from rostra.train.choose import choose_layout
from support import ended, need, refused, rostra, start

Tiny = Callable[..., dict[str, Any]]
CPU = torch.device("cpu")


def layout_of(config: Config, ranks: int) -> Layout:
    """The layout of a run on so many ranks, when neither the table nor the model refuses it."""
    layout = choose_layout(config, CPU, 1000, 1000, ranks)
    special: dict[str, int | None] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    shape = scratch_config(config.model, 300, config.data.sequence_length, special)
    check_layout(config, layout, shape)
    return layout


# Ranks, what is changed in a config whose model has 4 heads, 2 key/value heads and 2 layers,
# with 4 samples of 32 positions; and what the message must say.
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "heads that tensor ranks cannot share": (
        3,
        {"parallel": {"tensor": 3}},
        ("parallel.tensor = 3", "4 attention heads", "the largest that works below it is 2"),
    ),
    "key/value heads that tensor ranks cannot share": (
        4,
        {"parallel": {"tensor": 4}},
        ("parallel.tensor = 4", "2 key/value heads", "the largest that works below it is 2"),
    ),
    "more stages than layers": (
        4,
        {"parallel": {"pipeline": 4}},
        ("parallel.pipeline = 4", "4 stages for 2 layers", "parallel.pipeline: 2"),
    ),
    "more stages than layers, several a rank": (
        2,
        {"parallel": {"pipeline": 2, "stages": 2, "schedule": "interleaved_1f1b"}},
        ("parallel.pipeline = 2", "4 stages for 2 layers", "parallel.pipeline: 1"),
    ),
    "too few micro batches for a schedule": (
        2,
        {"parallel": {"pipeline": 2}, "train": {"micro_batch_size": 4}},
        ("parallel.schedule = 1f1b", "1 micro batches", "nearest that works is 2", "gpipe"),
    ),
    "micro batches that a schedule cannot take": (
        2,
        {
            "parallel": {"pipeline": 2, "schedule": "zero_bubble"},
            "train": {"micro_batch_size": 1, "global_batch_size": 5},
        },
        ("parallel.schedule = zero_bubble", "5 micro batches", "nearest that works is 4"),
    ),
    "a context that does not divide the length": (
        2,
        {"parallel": {"context": 2}, "data": {"sequence_length": 33}},
        ("parallel.context = 2", "data.sequence_length (33)", "parallel.context: 1"),
    ),
    "a context that does not divide the heads": (
        3,
        {"parallel": {"context": 3}, "data": {"sequence_length": 36}},
        ("parallel.context = 3", "4 query heads", "parallel.context: 2"),
    ),
    "axes that make up too few ranks": (
        4,
        {"parallel": {"shard": 3}},
        ("parallel.shard = 3", "make up 3 ranks, and 4 were started", "--workers 3"),
    ),
    "axes that do not divide the ranks": (
        8,
        {"parallel": {"tensor": 3}},
        ("parallel.tensor = 3", "3 ranks or a multiple, and 8 were started", "--workers 9"),
    ),
    "fewer samples than data ranks": (
        8,
        {"parallel": {"replicate": 8}},
        ("train.global_batch_size = 4", "8 data ranks", "set it to 8"),
    ),
    "8-bit states in the stretches of zero1": (
        2,
        {"parallel": {"sharding": "zero1"}, "memory": {"optimizer_states": "int8"}},
        (
            "memory.optimizer_states = int8, parallel.sharding = zero1, parallel.shard = 2: ",
            "use full_shard",
            "the nearest layout that works: memory.optimizer_states: fp32",
        ),
    ),
    "8-bit states over tensor ranks": (
        2,
        {"parallel": {"tensor": 2}, "memory": {"optimizer_states": "int8"}},
        ("memory.optimizer_states = int8, parallel.tensor = 2: ", "the nearest layout that works"),
    ),
    "a matrix optimizer on parts": (
        2,
        {"parallel": {"sharding": "full_shard"}, "optimizer": {"name": "muon"}},
        ("optimizer.name = muon", "parallel.sharding = full_shard", "use adamw"),
    ),
    "several stages without a schedule for them": (
        2,
        {"parallel": {"pipeline": 2, "stages": 2}},
        ("parallel.stages = 2, parallel.schedule = 1f1b", "parallel.schedule: interleaved_1f1b"),
    ),
    "an offload of what is whole": (
        2,
        {"memory": {"offload": {"parameters": "cpu", "optimizer": "cpu"}}, "parallel": {}},
        ("memory.offload.parameters = cpu", "parallel.sharding: full_shard"),
    ),
    "NVMe on the torch engine": (
        2,
        {
            "memory": {"offload": {"parameters": "nvme", "optimizer": "nvme", "path": "/tmp"}},
            "parallel": {"sharding": "full_shard"},
        },
        (
            "memory.offload.parameters = nvme, memory.offload.optimizer = nvme: ",
            "the nearest layout that works: parallel.engine: deepspeed",
        ),
    ),
    "DeepSpeed with tensor ranks": (
        2,
        {"parallel": {"engine": "deepspeed", "tensor": 2}},
        ("parallel.engine = deepspeed, parallel.tensor = 2: ", "parallel.engine: torch"),
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_wrong_layout_is_told(case: str, tiny: Tiny) -> None:
    ranks, changes, said = LAYOUTS[case]
    with pytest.raises(RequestError) as caught:
        layout_of(config_from_dict(tiny(**changes)), ranks)
    for words in said:
        assert words in str(caught.value)


def test_what_is_next_to_it_works(tiny: Tiny) -> None:
    """The same config, with what the messages say to do."""
    right: list[tuple[int, dict[str, Any]]] = [
        (2, {"parallel": {"tensor": 2}}),
        (2, {"parallel": {"pipeline": 2}, "train": {"micro_batch_size": 2}}),
        (2, {"parallel": {"context": 2}}),
        (9, {"parallel": {"shard": 9}, "train": {"global_batch_size": 9}}),
        (8, {"parallel": {"replicate": 8}, "train": {"global_batch_size": 8}}),
        (2, {"parallel": {"sharding": "full_shard"}, "memory": {"optimizer_states": "int8"}}),
    ]
    for ranks, changes in right:
        assert layout_of(config_from_dict(tiny(**changes)), ranks).world_size == ranks


# What one process suffices for: told when the run begins, or when its config is read.
ALONE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown checkpointing": (
        {"memory": {"activation_checkpointing": "some"}},
        ("memory.activation_checkpointing", "some", "full", "every"),
    ),
    "accumulation, with updates in the backward pass": (
        {
            "memory": {"optimizer_in_backward": True},
            "stability": {"clip": None},
            "train": {"micro_batch_size": 2},
        },
        (
            "memory.optimizer_in_backward = true, accumulation = 2: ",
            "the nearest layout that works: train.micro_batch_size: 4",
        ),
    ),
    "clipping, with updates in the backward pass": (
        {"memory": {"optimizer_in_backward": True}},
        ("memory.optimizer_in_backward", "stability.clip: null"),
    ),
    "float8 on a CPU": (
        {"precision": {"compute": "fp8"}},
        ("precision.compute = fp8", "cpu", "use bf16"),
    ),
    "a paged optimizer on a CPU": (
        {"memory": {"optimizer_states": "paged_int8"}},
        ("memory.optimizer_states = paged_int8", "CUDA", "use int8"),
    ),
    "8-bit states of another optimizer": (
        {"memory": {"optimizer_states": "int8"}, "optimizer": {"name": "lion"}},
        ("memory.optimizer_states = int8", "optimizer.name is lion", "optimizer.name: adamw"),
    ),
    "a DeepSpeed file for the torch engine": (
        {"parallel": {"deepspeed": "ds.json"}},
        ("parallel", "engine: deepspeed"),
    ),
    "a misspelt key of DeepSpeed's": (
        {"parallel": {"engine": "deepspeed", "deepspeed": "ds.json"}},
        ("ds.json", "zero_optimisation", "did you mean `zero_optimization`"),
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_a_wrong_request_leaves_nothing(case: str, tiny: Tiny, tmp_path: Path) -> None:
    changes, said = ALONE[case]
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimisation": {"stage": 3}}')
    values = json.loads(json.dumps(tiny(**changes)).replace('"ds.json"', json.dumps(str(file))))
    if torch.cuda.is_available() and case.endswith("on a CPU"):
        pytest.skip("a GPU is here")
    with pytest.raises(RequestError) as caught:
        Run.open(values).train()
    for words in said:
        assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


def written(path: Path, values: dict[str, Any]) -> str:
    path.write_text(json.dumps(values))
    return str(path)


def test_ranks_of_a_run_refuse_together(tiny: Tiny, tmp_path: Path) -> None:
    """Processes of their own, through `rostra train --workers`: what all say is told once."""
    values = tiny(parallel={"context": 2}, data={"sequence_length": 33})
    config = written(tmp_path / "run.yaml", values)
    told = ("parallel.context = 2", "data.sequence_length (33)")
    refused(ended(start("train", config, "--workers", "2")), *told)
    assert not (tmp_path / "run").exists()


def test_deepspeed_that_is_not_installed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import is blocked: the error is Python's own for a module that is not there."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    config = written(tmp_path / "run.yaml", tiny(parallel={"engine": "deepspeed"}))
    said = ("parallel.engine: deepspeed", "rostra[deepspeed]", "parallel.engine: torch")
    refused(rostra("train", config), *said)
    assert not (tmp_path / "run").exists()


def test_an_nvme_folder_that_is_not_there(tiny: Tiny, tmp_path: Path) -> None:
    """One that is too small: see `tests/parallel/test_deepspeed.py`."""
    need(find_spec("deepspeed"), "deepspeed")
    offload = {"optimizer": "nvme", "path": str(tmp_path / "nvme")}
    parallel = {"engine": "deepspeed", "sharding": "full_shard"}
    values = tiny(parallel=parallel, memory={"offload": offload})
    done = rostra("train", written(tmp_path / "run.yaml", values))
    refused(done, "memory.offload.optimizer", str(tmp_path / "nvme"), "offload to cpu")
    assert not (tmp_path / "run").exists()


# Rows that stand for gaps of what is under Rostra: when it begins to work, a row can go.


def attempt(layout: dict[str, Any]) -> str:
    """The error of some steps under a layout; the table is not asked."""
    try:
        run("llama", layout, 2, 8)
    except Exception as error:
        return str(error)
    return ""


def test_zero1_cannot_cut_a_part_of_a_matrix(ranks: Ranks) -> None:
    layout = {"micro_batch": 2, "accumulation": 2, "sharding": "zero1", "shard": 2, "tensor": 2}
    assert [rule.name for rule in refusals(Layout(**layout))] == ["zero1 cuts whole parameters"]
    for error in ranks.run(4, attempt, layout):
        assert "is not one rectangle" in error


@pytest.mark.parametrize("mode", ["full", "selective:mlp", "selective:operations"])
def test_kept_operations_are_for_one_backward_pass(mode: str) -> None:
    """zero_bubble takes two: one for what goes into a stage, and one for its weights."""
    bubble: dict[str, Any] = {"pipeline": 2, "pipeline_schedule": "zero_bubble"}
    asked = Layout(2, 4, **bubble, activation_checkpointing=mode)
    model = model_of("llama", layers=2).train()
    checkpoint_activations(model, mode)
    embedded = model.get_input_embeddings()(batch_of().input_ids).detach().requires_grad_()
    total = model(inputs_embeds=embedded, use_cache=False).logits.square().sum()
    torch.autograd.grad(total, embedded, retain_graph=True)
    weights = list(model.model.layers.parameters())
    if rules := refusals(asked):
        assert [rule.name for rule in rules] == ["zero bubble recomputes whole modules"]
        with pytest.raises(RuntimeError, match="only allowed to backward once"):
            torch.autograd.grad(total, weights)
    else:
        torch.autograd.grad(total, weights)
    assert bool(rules) == (mode == "selective:operations")


def test_bf16_pure_over_parts_would_be_float32(ranks: Ranks) -> None:
    """Nothing fails, and nothing is computed in bfloat16: the losses are float32's to 1e-5."""
    plain = {"micro_batch": 4, "accumulation": 1, "shard": 2, "sharding": "full_shard"}
    layout = {**plain, "compute": "bf16_pure"}
    assert [r.name for r in refusals(Layout(**layout))] == ["bf16_pure keeps whole parameters"]
    asked = ranks.run(2, run, "llama", layout, 2, 8)[0]
    exact = ranks.run(2, run, "llama", plain, 2, 8)[0]
    assert difference(exact, asked)["loss"] < 1e-5
    whole = ranks.run(2, run, "llama", {**layout, "sharding": "zero1"}, 2, 8)[0]
    assert difference(exact, whole)["loss"] > 1e-5
