"""`rostra plan`: the answer scripts and people get, and `parallel: auto`, which trains with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rostra import Run
from rostra.config import config_from_dict
from rostra.errors import NoLayoutFits, TrainingFailed
from rostra.layout import Layout, refusals
from rostra.memory import explain_out_of_memory
from rostra.plan.request import shape_of
from rostra.plan.words import in_yaml
from rostra.train.choose import POSITIONS
from rostra.train.planned import Start, plan_run
from support import Done, refused, rostra

ROOT = Path(__file__).parents[2]
NOWHERE = {"parameters": "none", "optimizer": "none"}
Tiny = Callable[..., dict[str, Any]]

# What scripts rely on; more keys are welcome.
PLAN = {"feasible", "chosen", "considered", "search_seconds", "alternatives"}
LAYOUT = {
    "layout", "memory_bytes", "host_memory_bytes", "step_seconds", "tokens_per_second", "mfu",
    "hours", "price",
}  # fmt: skip


def planned(*arguments: str | Path) -> dict[str, Any]:
    done = rostra("plan", "--json", "--no-trace", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return planned("--model", "meta-llama/Llama-3.2-1B", "--hardware", "2xL4", "--allow", "8bit")


def test_a_model_by_name_needs_no_config_and_no_network(one: dict[str, Any]) -> None:
    assert one.keys() >= PLAN
    assert one["feasible"]
    for found in (one["chosen"], *one["alternatives"]):
        assert found.keys() >= LAYOUT
        layout = Layout.from_dict(found["layout"])
        assert not refusals(layout)
        kinds = dict(found["memory_bytes"])
        total = kinds.pop("total")
        assert total == sum(kinds.values()) <= one["hardware"]["device_memory_bytes"]
        tokens = one["model"]["global_batch_size"] * one["model"]["sequence_length"]
        assert found["tokens_per_second"] == pytest.approx(tokens / found["step_seconds"])
        hours = one["model"]["tokens"] / found["tokens_per_second"] / 3600
        price = hours * layout.world_size * one["hardware"]["price_per_hour"]
        assert (found["hours"], found["price"]) == pytest.approx((hours, price))
    assert one["considered"] > 1000
    assert one["search_seconds"] > 0
    assert any("2,048 tokens" in note for note in one["notes"])  # what nobody said


def test_goals_are_the_best_of_their_kind(one: dict[str, Any]) -> None:
    fastest, cheapest, fewest = (one[goal] for goal in ("fastest", "cheapest", "fewest"))
    everyone = [fastest, cheapest, fewest, one["chosen"], *one["alternatives"]]
    assert fastest["step_seconds"] == min(x["step_seconds"] for x in everyone)
    assert cheapest["price"] == min(x["price"] for x in everyone)
    ranks = [Layout.from_dict(x["layout"]).world_size for x in (fewest, *everyone)]
    assert ranks[0] == min(ranks)
    assert one["chosen"]["step_seconds"] <= 1.03 * fastest["step_seconds"]
    assert one["chosen"]["layout"]["optimizer_states"] == "fp32"  # 8 bits would be hardly faster
    assert fastest["layout"]["optimizer_states"] == "int8"
    assert {x["ranks"] for x in one["front"]} == {1, 2}


def test_each_technique_says_what_it_saves_and_costs(one: dict[str, Any]) -> None:
    told = {x["technique"]: x for x in one["techniques"]}
    assert told.keys() >= {"checkpointing full", "offload", "lora", "qlora", "compile"}
    for saves in (told["checkpointing full"], told["offload"]):  # memory against time
        sign = -1 if saves["used"] else 1  # what is used is told by what leaving it out does
        assert sign * saves["memory_bytes"] <= 0 <= sign * saves["step_seconds"]
    assert told["lora"]["memory_bytes"] < 0  # no gradients and states of weights


def test_why_not_names_what_a_strategy_uses_and_no_money_below_a_cent() -> None:
    asked = ("--hardware", "2xL4", "--length", "512", "--allow", "lora,qlora")
    found = planned("--model", "gpt2", *asked)
    used = [set(x["strategy"].split(", ")) & {"lora", "qlora"} for x in found["why_not"]]
    assert {frozenset(x) for x in used} == {frozenset(), frozenset({"lora"}), frozenset({"qlora"})}
    assert not [x for x in found["why_not"] if "0.00" in x["reason"]]
    for x in (found["chosen"], *found["alternatives"]):
        assert x["peak_bytes"] >= x["memory_bytes"]["total"]
        assert x["host_peak_bytes"] >= x["host_memory_bytes"]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    planned("--model", "gpt2", "--hardware", "L4", "--length", "512", "--html", path)

    class Reader(HTMLParser):
        loads, images, headings = [], [], []  # type: ignore[var-annotated]

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            found = dict(attrs)
            self.loads += [v for k, v in attrs if k in ("src", "href")]
            if found.get("role") == "img":
                self.images.append(found["aria-label"])
            if tag.startswith("h"):
                self.headings.append(tag)

    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert reader.loads == []
    assert all("activations" in label for label in reader.images)
    assert len(reader.images) > 1
    assert {"h1", "h2"} <= set(reader.headings)


def test_people_get_tables() -> None:
    asked = ("--model", "gpt2", "--hardware", "2xL4", "--length", "512", "--no-trace")
    done = rostra("plan", *asked)
    assert done.returncode == 0, done.stderr
    for words in ("assumed: ", "micro_batch_size", "tokens/s", "with lora", "considered in"):
        assert words in done.stdout


def fails(done: Done, *said: str) -> None:
    """Exit code 3, with one message."""
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    for words in said:
        assert words in done.stderr


def test_what_does_not_fit_ends_with_3_and_what_would() -> None:
    asked = ("--model", "meta-llama/Llama-2-7b", "--hardware", "1xL4")
    done = rostra("plan", "--json", *asked)
    fails(done, "no layout fits 1xL4", "the nearest that fits: ")
    found = json.loads(done.stdout)
    assert found["feasible"] is False
    assert found["chosen"] is None
    ways = found["nearest_feasible"]
    assert ways
    for way in ways:
        assert way.keys() >= LAYOUT
        assert way["changes"]
    assert any("qlora" in way["changes"][0] or "lora" in way["changes"][0] for way in ways)


def test_wrong_requests_name_the_nearest() -> None:
    model = ("--model", "gpt2")
    refused(rostra("plan", *model, "--hardware", "8xH10"), "H100")
    refused(rostra("plan", "--model", "gpt-2-smal", "--hardware", "L4"), "gpt2")
    refused(rostra("plan", *model, "--hardware", "L4", "--allow", "qlorra"), "qlora")
    refused(rostra("plan", *model, "--hardware", "L4", "--allow", "int8"), "int8-states")
    refused(rostra("plan", *model, "--hardware", "L4", "--method", "lorra"), "full, lora, qlora")
    refused(rostra("plan", *model, "--hardware", "L4", "--goal", "best"), "fewest")
    refused(rostra("plan", *model, "--hardware", "L4", "--length", "4096"), "at most 1024")
    refused(rostra("plan"), "--model NAME")
    scratch = ROOT / "examples" / "quickstart.yaml"
    refused(rostra("plan", scratch, "--hardware", "L4", "--method", "lora"), "model.pretrained")


def test_a_config_keeps_what_it_says(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tiny(parallel={"tensor": 2}, train={"micro_batch_size": 1})))
    found = planned(file, "--hardware", "2xL4", "--price", "3")
    layout = Layout.from_dict(found["chosen"]["layout"])
    assert (layout.tensor, layout.world_size, layout.micro_batch) == (2, 2, 1)
    assert layout.compute == "fp32"
    assert found["hardware"]["price_per_hour"] == 3


def test_a_plan_for_a_cpu_keeps_micro_batches_in_caches_as_training_does() -> None:
    found = planned("--model", "gpt2", "--hardware", "cpu", "--length", "512")
    assert found["chosen"]["layout"]["micro_batch"] * 512 <= POSITIONS


def test_the_choice_is_traced() -> None:
    """By running its engine on tensors without memory; formulas and trace are about one."""
    run = Run.open(
        {
            "model": {"preset": "tiny"},
            "data": {
                "sources": [{"type": "text", "path": "x"}],
                "tokenizer": {"vocabulary": 300},
                "sequence_length": 128,
            },
            "train": {"steps": 10, "global_batch_size": 16},
            "parallel": {"shard": 2},
            "memory": {"activation_checkpointing": "none", "offload": NOWHERE},
        }
    )
    traced, formula = (run.plan("2xL4", trace=x).plan.chosen for x in (True, False))
    assert traced is not None
    assert formula is not None
    assert (traced.memory.source, formula.memory.source) == ("trace", "formula")
    assert traced.layout == formula.layout
    assert traced.memory.live == pytest.approx(formula.memory.live, rel=0.1)
    assert traced.memory.kinds["reserved"] == formula.memory.kinds["reserved"] > 0


def test_a_layout_is_told_as_a_config_says_it() -> None:
    layout = Layout(
        2, 4, shard=4, tensor=2, sharding="full_shard", offload_optimizer="cpu", compute="bf16"
    )
    lines = in_yaml(layout)
    assert lines == [
        "train: {micro_batch_size: 2}",
        "parallel: {shard: 4, tensor: 2}",
        "memory: {offload: {optimizer: cpu}}",
        "precision: {compute: bf16}",
    ]


def start_of(values: dict[str, Any], ranks: int = 1, before: Layout | None = None) -> Start:
    config = config_from_dict(values)
    shape = shape_of(config, [])
    return Start(config, shape, 10**5, 10**5, torch.device("cpu"), ranks, ranks, before)


def test_auto_trains_with_the_plans_choice(tiny: Tiny) -> None:
    run = Run.open(tiny())
    summary = run.train()
    plan = json.loads((run.path / "plan.json").read_text())
    assert plan.keys() >= PLAN
    assert plan["chosen"]["layout"] == summary["layout"]
    measured, foretold = summary["peak_memory_bytes"], summary["planned_peak_memory_bytes"]
    assert foretold == pytest.approx(measured, rel=0.2)  # tiny models are the hardest


def test_all_ranks_are_used_and_micro_batches_stay_in_caches(tiny: Tiny) -> None:
    for ranks in (1, 2, 4):
        layout, plan = plan_run(start_of(tiny(train={"global_batch_size": 1024}), ranks), print)
        assert plan is not None
        assert layout.world_size == ranks
        assert layout.micro_batch * 32 <= POSITIONS
    examples = tiny(
        data={"sources": [{"type": "completion", "path": "x"}], "packing": "none"},
        train={"global_batch_size": 64},
    )
    layout, _ = plan_run(start_of(examples, 2), print)
    assert layout.context * layout.pipeline == 1  # samples of any length


def test_a_run_that_goes_on_keeps_its_layout(tiny: Tiny) -> None:
    before = Layout(1, 2, replicate=2, activation_checkpointing="full")
    assert plan_run(start_of(tiny(), 2, before), print)[0] == before
    fixed = tiny(memory={"activation_checkpointing": "none"})
    assert plan_run(start_of(fixed, 2, before), print)[0] != before


def test_a_model_that_cannot_fit_is_not_started(tiny: Tiny) -> None:
    huge = {"hidden_size": 65536, "layers": 128, "heads": 128}
    values = tiny(model={"preset": None, "architecture": "llama", "size": huge})
    with pytest.raises(NoLayoutFits, match="no layout fits"):
        plan_run(start_of(values), print)
    told: list[str] = []
    values["parallel"], values["train"]["micro_batch_size"] = {"replicate": 1}, 1
    layout, _ = plan_run(start_of(values), told.append)  # what is fixed is tried
    assert layout.micro_batch == 1
    assert any("no layout fits" in message for message in told)


def test_a_model_beyond_the_planner_trains_without_a_plan(tiny: Tiny) -> None:
    start = start_of(tiny())
    other = AutoConfig.for_model("mamba", num_hidden_layers=2, hidden_size=64)  # no attention
    told: list[str] = []
    layout, plan = plan_run(replace(start, shape=other), told.append)
    assert plan is None
    assert layout.micro_batch == 4
    assert any("without a plan" in message for message in told)


def test_out_of_memory_says_what_was_expected_and_what_to_change() -> None:
    kinds = {"parameters": 10**9, "activations": 3 * 10**9}
    with (
        pytest.raises(TrainingFailed, match=r"expected 4.0 GB \(activations 3.0 GB") as caught,
        explain_out_of_memory(kinds),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "memory.activation_checkpointing: full" in str(caught.value)
    with (
        pytest.raises(TrainingFailed, match=r"memory\.optimizer_states: int8"),
        explain_out_of_memory({"optimizer": 10**9}),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_model_by_name_takes_values_of_a_config() -> None:
    sharded = planned(
        "--model", "meta-llama/Llama-3.2-1B", "--method", "lora", "--hardware", "2xL4",
        "--set", "adapter.rank=64", "--set", "parallel.sharding=full_shard",
    )  # fmt: skip
    assert sharded["chosen"]["layout"]["sharding"] == "full_shard"
    done = rostra("plan", "--model", "gpt2", "--hardware", "1xL4", "--set", "parallel.shards=2")
    refused(done, "parallel.shards", "parallel.shard")


def test_it_says_which_memory_there_is_too_little_of() -> None:
    done = rostra(
        "plan", "--model", "meta-llama/Llama-2-70b-hf", "--hardware", "4xA100-80GB", "--no-trace",
        "--set", "parallel={shard: 4, sharding: full_shard}",
        "--set", "memory.offload={parameters: cpu, optimizer: cpu}",
    )  # fmt: skip
    fails(done, "of host memory while it trains (a rank has")
    done = rostra(
        "plan", "--model", "gpt2", "--hardware", "8xA100-80GB", "--set", "parallel.tensor=4"
    )
    fails(done, "the projections of a gpt2 cannot be split")
