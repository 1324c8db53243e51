"""What was saved under one layout goes on under any other, with the losses it would have had."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parallel import common
from parallel.common import CPU, batch_of, config_of, mixture, parameters_of, part_of
from ranks import Ranks
from rostra.build import build_engine
from rostra.checkpoint import Position, open_checkpoint, save_checkpoint
from rostra.events import Events
from rostra.layout import Layout
from rostra.parallel import TorchEngine
from rostra.store import RunFolder
from rostra.train import train_step

SAVED, STEPS = 2, 4  # steps done when it is saved, and in the end

ONE: dict[str, Any] = {}
DDP = {"replicate": 2}
ZERO1 = {"shard": 2, "sharding": "zero1"}
ZERO1_4 = {"shard": 4, "sharding": "zero1"}
GRAD_OP = {"shard": 2, "sharding": "shard_grad_op"}
FULL = {"shard": 2, "sharding": "full_shard"}
FULL_4 = {"shard": 4, "sharding": "full_shard"}
TENSOR = {"tensor": 2}
PIPELINE = {"pipeline": 2, "pipeline_schedule": "1f1b"}
INTERLEAVED = {"pipeline": 2, "pipeline_schedule": "interleaved_1f1b", "stages": 2}
BF16_PURE = {"compute": "bf16_pure"}
INT8 = {"optimizer_states": "int8"}

# A rank in four has less of a matrix than the others, nothing of some norm, and one layer of three.
UNEVEN = {"hidden_size": 18, "layers": 3, "heads": 3, "kv_heads": 3, "intermediate_size": 50}
WIDE = {"layers": 1, "hidden_size": 256}  # halves of its matrices are whole blocks

# Of losses in nats and of parameters, beside 1e-5: a last bit of bfloat16 weights of about 0.1,
# and codes of 8 bits that a last bit of a gradient changes.
TOLERANCES = {"bf16": (1e-5, 1e-3), "8 bits": (3e-4, 1e-3)}

# What trains, and the layouts of a ring: each goes on with what the one before it saved.
RINGS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "llama": (
        {},
        {
            "one process": ONE,
            "ddp": DDP,
            "zero1": ZERO1,
            "pipeline": PIPELINE,
            "shard_grad_op": GRAD_OP,
            "full_shard": FULL,
            "tensor": TENSOR,
            "context": {"context": 2},
            "hybrid_shard": {"shard": 2, "replicate": 2, "sharding": "hybrid_shard"},
            "full_shard x tensor": {**FULL, **TENSOR},
            "offloaded": {**FULL, "offload_parameters": "cpu", "offload_optimizer": "cpu"},
            "full_shard x pipeline": {**FULL, **PIPELINE},
            "zero1, states on the host": {**ZERO1, "offload_optimizer": "cpu"},
        },
    ),
    "tied embeddings": (
        {"architecture": "gemma3"},
        {
            "one process": ONE,
            "pipeline": PIPELINE,
            "full_shard": FULL,
            "interleaved": INTERLEAVED,
            "tensor": TENSOR,
            "zero1 x pipeline": {**ZERO1, **PIPELINE},
        },
    ),
    "experts": (
        {"architecture": "qwen3_moe"},
        {"one process": ONE, "zero1": ZERO1, "full_shard": FULL},
    ),
    "uneven sizes": (
        {"size": UNEVEN, "samples": 5},
        {
            "one process": ONE,
            "full_shard on 4": FULL_4,
            "pipeline": PIPELINE,
            "zero1 on 4": ZERO1_4,
            "full_shard": FULL,
        },
    ),
    "sgd": (
        {"optimizer": {"name": "sgd", "momentum": 0.9, "learning_rate": 0.1}},
        {"one process": ONE, "zero1": ZERO1, "full_shard": FULL},
    ),
    "lion": (
        {"optimizer": {"name": "lion", "learning_rate": 1e-4}},
        {"one process": ONE, "full_shard": FULL, "zero1": ZERO1},
    ),
    "bf16_pure": (
        {"tolerance": "bf16"},
        {"one process": BF16_PURE, "ddp": {**DDP, **BF16_PURE}, "zero1": {**ZERO1, **BF16_PURE}},
    ),
    "int8 states": (
        {"size": WIDE, "tolerance": "8 bits"},
        {"one process": INT8, "full_shard": {**FULL, **INT8}, "ddp": {**DDP, **INT8}},
    ),
}


def model_of(what: dict[str, Any]) -> PreTrainedModel:
    architecture = what.get("architecture", "llama")
    if architecture == "qwen3_moe":
        return mixture(2)
    sizes = {**what.get("size", {}), "dropout": what.get("dropout", 0.0)}
    return common.model_of(architecture, **sizes)


def engine_of(what: dict[str, Any], layout: Layout, model: PreTrainedModel) -> TorchEngine:
    train = {"global_batch_size": what.get("samples", 8)}
    optimizer = {"epsilon": 1e-6, **what.get("optimizer", {})}
    config = config_of(train=train, optimizer=optimizer)
    return build_engine(config, layout, model, CPU, 10, Events())


def layout_of(what: dict[str, Any], values: dict[str, Any]) -> Layout:
    rows = -(-what.get("samples", 8) // (values.get("replicate", 1) * values.get("shard", 1)))
    return Layout(micro_batch=2, accumulation=-(-rows // 2), **values)


def steps_of(engine: TorchEngine, what: dict[str, Any], first: int, end: int) -> dict[str, Any]:
    outcomes = [
        train_step(engine, part_of(batch_of(step, what.get("samples", 8)), engine))
        for step in range(first, end)
    ]
    return {
        "loss": [outcome.loss for outcome in outcomes],
        "norm": [outcome.gradient_norm for outcome in outcomes],
        "rate": [outcome.learning_rate for outcome in outcomes],
    }


def position_of(what: dict[str, Any]) -> Position:
    return Position(SAVED, SAVED * what.get("samples", 8), tokens=1)


def save(folder: str, engine: TorchEngine, what: dict[str, Any], layout: Layout) -> None:
    run, config = RunFolder(Path(folder)), {"run": {"seed": 0}}
    save_checkpoint(run, engine, position_of(what), layout, config, {})


def write(folder: str, what: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Train to the end and save on the way; losses and norms of all steps, final parameters."""
    layout = layout_of(what, values)
    engine = engine_of(what, layout, model_of(what))
    before = steps_of(engine, what, 0, SAVED)
    save(folder, engine, what, layout)
    after = steps_of(engine, what, SAVED, STEPS)
    found = {name: before[name] + after[name] for name in before}
    return {**found, "parameters": parameters_of(engine)}


def read(folder: str, what: dict[str, Any], values: dict[str, Any], copy: str) -> dict[str, Any]:
    """Go on to the end from what is saved in `folder`, with nothing else to start from; and
    first save it again, in `copy`."""
    model, layout = model_of(what), layout_of(what, values)
    for parameter in model.parameters():
        parameter.data.fill_(0.3)
    engine = engine_of(what, layout, model)
    checkpoint = open_checkpoint(RunFolder(Path(folder)).checkpoint(SAVED))
    checkpoint.restore(engine)
    assert checkpoint.position == position_of(what)
    save(copy, engine, what, layout)
    found = steps_of(engine, what, SAVED, STEPS)
    return {**found, "parameters": parameters_of(engine)}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, but for the ranks' random states."""
    reader = open_checkpoint(RunFolder(folder).checkpoint(SAVED)).reader()
    shapes = {n: reader.shape(n) for n in reader.names() if not n.startswith("random/")}
    return {name: reader.read(name, (0,) * len(x), x) for name, x in shapes.items()}


def on(
    ranks: Ranks,
    task: Any,
    folder: Path,
    what: dict[str, Any],
    values: dict[str, Any],
    *more: str,
) -> Any:
    """What `task` gives on the ranks of a layout, which all say the same."""
    layout = layout_of(what, values)
    if layout.world_size == 1:
        torch.manual_seed(0)
        return task(str(folder), what, values, *more)
    found = ranks.run(layout.world_size, task, str(folder), what, values, *more)
    for other in found[1:]:
        assert_equal(found[0], other)
    return found[0]


@pytest.fixture(scope="module")
def written(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder in which a layout of a ring saved, and how the run went on; made once."""

    @cache
    def make(ring: str, name: str) -> tuple[Path, dict[str, Any]]:
        what, layouts = RINGS[ring]
        folder = tmp_path_factory.mktemp("run")
        return folder, on(ranks, write, folder, what, layouts[name])

    return make


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit by bit."""
    for key in ("loss", "norm", "rate"):
        assert one[key] == other[key], key
    assert one["parameters"].keys() == other["parameters"].keys()
    for name, value in one["parameters"].items():
        assert torch.equal(value, other["parameters"][name]), name


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def assert_goes_on(found: dict[str, Any], whole: dict[str, Any], what: dict[str, Any]) -> None:
    """`found` has the last steps as `whole` has them."""
    loss, weights = TOLERANCES.get(what.get("tolerance"), (1e-5, 1e-5))
    last = len(found["loss"])
    assert found["rate"] == whole["rate"][-last:]
    assert found["loss"] == pytest.approx(whole["loss"][-last:], rel=0, abs=loss)
    assert found["norm"] == pytest.approx(whole["norm"][-last:], rel=10 * loss)
    assert found["parameters"].keys() == whole["parameters"].keys()
    for name, value in found["parameters"].items():
        assert apart(value, whole["parameters"][name]) < weights, name


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


CASES = [(ring, name) for ring, (_, layouts) in RINGS.items() for name in layouts]


@pytest.mark.parametrize(("ring", "name"), CASES)
def test_a_run_goes_on(ring: str, name: str, ranks: Ranks, written: Any, tmp_path: Path) -> None:
    """Bit by bit under the same layout; under the next of the ring as one process would. What
    another layout has read, it saves as it was, to the bit."""
    what, layouts = RINGS[ring]
    folder, undisturbed = written(ring, name)
    whole = written(ring, "one process")[1]
    assert_goes_on(undisturbed, whole, what)
    again = on(ranks, read, folder, what, layouts[name], str(tmp_path / "again"))
    ended = {key: value[SAVED:] for key, value in undisturbed.items() if key != "parameters"}
    assert_equal(again, {**ended, "parameters": undisturbed["parameters"]})
    names = list(layouts)
    other = layouts[names[(names.index(name) + 1) % len(names)]]
    assert_goes_on(on(ranks, read, folder, what, other, str(tmp_path / "other")), whole, what)
    for copy in ("again", "other"):
        assert_same_tensors(folder, tmp_path / copy)


@pytest.mark.parametrize("name", ["ddp", "full_shard", "pipeline"])
def test_dropout_goes_on_as_it_would_have(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's random state is its own, and comes back to it."""
    what, values = {"architecture": "gpt2", "dropout": 0.2}, RINGS["llama"][1][name]
    undisturbed = on(ranks, write, tmp_path, what, values)
    again = on(ranks, read, tmp_path, what, values, str(tmp_path / "again"))
    assert again["loss"] == undisturbed["loss"][SAVED:]


def test_weights_that_are_updated_elsewhere_are_loaded_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    """On the CPU, what is updated on the host is the model itself; on a GPU it is a copy, as it
    is made to be here."""

    def copied(parameter: Tensor, *_: Any) -> nn.Parameter:
        return nn.Parameter(parameter.detach().clone())

    monkeypatch.setattr("rostra.optim.precision._master", copied)
    values = {"offload_optimizer": "cpu"}
    undisturbed = on(ranks, write, tmp_path, {}, values)
    again = on(ranks, read, tmp_path, {}, values, str(tmp_path / "again"))
    assert again["loss"] == undisturbed["loss"][SAVED:]
