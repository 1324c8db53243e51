"""DeepSpeed's ZeRO computes what one process computes, and its checkpoints are everybody's."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import common
import pytest
import torch
import torch.distributed as dist
from common import CPU, VOCABULARY
from torch import Tensor
from transformers import PreTrainedModel

from ranks import Ranks
from rostra.batch import Batch
from rostra.build import build_engine, check_layout
from rostra.config import Config
from rostra.config.deepspeed import deepspeed_config, layout_keys, read_deepspeed
from rostra.config.schema import OptimizerSection, ScheduleSection
from rostra.errors import RequestError
from rostra.events import Events
from rostra.layout import Layout
from rostra.models import SeededWeights, model_on_meta
from rostra.optim import LossScale, chunked_cross_entropy, make_schedule
from rostra.parallel.deepspeed_engine import DeepSpeedEngine
from rostra.parallel.deepspeed_start import (
    check_nvme,
    import_deepspeed,
    make_deepspeed_optimizers,
    materialize_cut,
)
from rostra.parallel.mesh import Mesh
from rostra.parallel.stage import AUTOCAST, Stage
from rostra.parallel.torch_engine import TorchEngine
from rostra.pieces import Below, PieceReader, Reader, merge, write_pieces
from support import GUIDE, need

SAMPLES, CLIP = 7, 0.5
STEPS = 5
ZERO = {"no_shard": 0, "zero1": 1, "shard_grad_op": 2, "full_shard": 3}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    need(find_spec("deepspeed"), "deepspeed")


@pytest.fixture(scope="module")
def host_adam() -> None:
    """DeepSpeed's Adam for the host, compiled once a machine: longer than ranks wait."""
    need(which("g++"), "g++")
    import_deepspeed(CPU)
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


@pytest.fixture(scope="module")
def swapping(host_adam: None) -> None:
    """What reads and writes NVMe, compiled likewise."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    need(AsyncIOBuilder().is_compatible(verbose=False), "libaio-dev")
    AsyncIOBuilder().load(verbose=False)


def model_of(hidden: int = 32, vocabulary: int = VOCABULARY, tied: bool = False) -> PreTrainedModel:
    sizes = {"hidden_size": hidden, "tie_embeddings": tied}
    return common.model_of("llama", 2, "sdpa", vocabulary, **sizes).train()


def batch_of(seed: int, samples: int = SAMPLES) -> Batch:
    return common.batch_of(seed, samples)


def stage_of(model: PreTrainedModel, compute: str = "fp32") -> Stage:
    def inputs(batch: Batch) -> tuple[dict[str, Any], Batch]:
        positions = {"position_ids": batch.position_ids}
        return {"input_ids": batch.input_ids, "use_cache": False, **positions}, batch

    def loss(
        model: PreTrainedModel, inputs: dict[str, Any], batch: Batch, factor: float
    ) -> tuple[Tensor, Tensor]:
        hidden = model.base_model(**inputs).last_hidden_state
        return chunked_cross_entropy(
            hidden, model.lm_head.weight, batch.labels, scale=factor, chunk=24
        )

    dtype = AUTOCAST.get(compute)
    cast = nullcontext if dtype is None else partial(torch.autocast, "cpu", dtype)
    return Stage(model, loss, inputs, autocast=cast)


def schedule() -> Any:
    return make_schedule(ScheduleSection(warmup=2), 10)


def section(name: str = "adamw") -> OptimizerSection:
    return OptimizerSection.model_validate({"name": name, "learning_rate": 1e-2})


def config_of(name: str, **sections: Any) -> Config:
    return common.config_of(
        **sections,
        train={"global_batch_size": SAMPLES},
        optimizer={"name": name, "learning_rate": 1e-2},
        schedule={"warmup": 2},
        stability={"clip": CLIP},
    )


def alone(name: str = "adamw", compute: Any = "fp32", **shape: Any) -> TorchEngine:
    """One process on PyTorch alone."""
    layout = Layout(SAMPLES, 1, compute=compute)
    return build_engine(config_of(name), layout, model_of(**shape), CPU, 10, Events())


def engine_of(
    keys: dict[str, Any],
    name: str = "adamw",
    user: Any = None,
    clip: float = CLIP,
    samples: int = SAMPLES,
    nvme: str | None = None,
    model: PreTrainedModel | None = None,
    weights: Reader | None = None,
    **shape: Any,
) -> DeepSpeedEngine:
    """DeepSpeed on the ranks that there are; `weights` are for a `model` on the meta device."""
    ranks = dist.get_world_size()
    split = "replicate" if keys.get("sharding", "no_shard") == "no_shard" else "shard"
    sizes = {"micro_batch": 2, "accumulation": 2, split: ranks}
    layout = Layout(engine="deepspeed", **{**sizes, **keys})
    model = model_of(**shape) if model is None else model
    config = deepspeed_config(
        layout,
        section(name),
        clip=clip,
        samples=samples,
        parameters=sum(p.numel() for p in model.parameters()),
        nvme_path=nvme,
        user=user,
    )
    if weights is not None:
        materialize_cut(model, config, weights, CPU)
    named = list(model.named_parameters())
    return DeepSpeedEngine(
        stages=[stage_of(model, layout.compute)],
        shape=model.config,
        optimizers=make_deepspeed_optimizers(section(name), named, set(), layout),
        schedule=schedule(),
        layout=layout,
        mesh=Mesh.of(layout, CPU),
        clip=clip,
        scale=LossScale(2.0**10, 2000) if layout.compute == "fp16" else LossScale(),
        config=config,
        rows=-(-SAMPLES // ranks),
    )


def steps(engine: Any, first: int, last: int) -> list[tuple[float, float, int]]:
    """Loss, gradient norm and targets of each step; this rank takes its share."""
    size, rank = engine.layout.data, engine.mesh.coordinate("replicate", "shard")
    found = []
    for step in range(first, last):
        each = -(-SAMPLES // size)
        part = batch_of(step).rows(rank * each, (rank + 1) * each)
        total, targets = engine.forward_backward(part)
        norm = engine.gradient_norm()
        engine.step(accept=True)
        found.append((total / targets, norm, targets))
    return found


def save(engine: Any, folder: Path) -> dict[str, Any]:
    """Write this rank's pieces; the index of what it wrote, and the plain values."""
    groups, values = engine.state()
    rank = dist.get_rank() if dist.is_initialized() else 0
    index: dict[str, Any] = {}
    for number, pieces in enumerate(groups):
        index |= write_pieces(folder / f"{rank}-{number}.safetensors", pieces)[0]
    return {"index": index, "values": values}


def held(engine: Any) -> dict[str, Tensor]:
    """What a rank would write, copied."""
    return {n: p.data.clone() for group in engine.state()[0] for n, p in group.items()}


def train(folder: str, first: int, last: int, start: Any, *arguments: Any, **more: Any) -> Any:
    """A task of ranks: go on from what `start` says, and save."""
    engine = engine_of(*arguments, **more)
    if start is not None:
        engine.load_state(PieceReader(Path(start[0]), start[1]), start[2])
    found = steps(engine, first, last)
    evaluated = engine.forward(batch_of(99))
    saved = save(engine, Path(folder))
    engine.close()
    return {"steps": found, "evaluated": evaluated, **saved}


def reader_of(folder: Path, saved: list[dict[str, Any]]) -> PieceReader:
    return PieceReader(folder, merge(each["index"] for each in saved))


@cache
def expected(name: str = "adamw") -> dict[str, Any]:
    engine = alone(name)
    found = steps(engine, 0, STEPS)
    weights = {f"model/{n}": p.detach() for n, p in engine.model.named_parameters()}
    states = {f"optimizer/{n}": v for n, v in engine.optimizers.state()[0].items()}
    return {
        "steps": found,
        "evaluated": engine.forward(batch_of(99)),
        "tensors": weights | states,
    }


def check(
    found: list[dict[str, Any]], folder: Path, name: str = "adamw", near: float = 1e-5
) -> None:
    """Losses, norms, weights and states are those of one process."""
    right = expected(name)
    for each in found:
        for (loss, norm, targets), (x, n, t) in zip(each["steps"], right["steps"], strict=True):
            assert targets == t
            assert loss == pytest.approx(x, abs=near)
            assert norm == pytest.approx(n, rel=near)
        (total, targets), (x, t) = each["evaluated"], right["evaluated"]
        assert targets == t
        assert total / targets == pytest.approx(x / t, abs=near)
    reader = reader_of(folder, found)
    assert set(reader.names()) == set(right["tensors"])
    for key, tensor in right["tensors"].items():
        whole = reader.read(key, (0,) * tensor.dim(), tuple(tensor.shape))
        assert torch.allclose(whole, tensor, atol=near), key


@pytest.mark.parametrize("sharding", ZERO)
def test_every_stage_equals_one_process(ranks: Ranks, tmp_path: Path, sharding: str) -> None:
    """With accumulation, clipping, and unequal samples and targets."""
    assert all(norm > CLIP for _, norm, _ in expected()["steps"])
    check(ranks.run(2, train, str(tmp_path), 0, STEPS, None, {"sharding": sharding}), tmp_path)


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_other_optimizers_that_work_number_by_number(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    keys = {"sharding": "zero1"}
    # the sign in Lion turns with a rounding of what is nearly zero
    near = 1e-5 if name == "sgd" else 3e-4
    check(ranks.run(2, train, str(tmp_path), 0, STEPS, None, keys, name), tmp_path, name, near)


@pytest.mark.usefixtures("host_adam")
@pytest.mark.parametrize("sharding", ["zero1", "shard_grad_op", "full_shard"])
def test_offloading_to_the_host_changes_nothing(
    ranks: Ranks, tmp_path: Path, sharding: str
) -> None:
    keys = {"sharding": sharding, "offload_optimizer": "cpu"}
    keys |= {"offload_parameters": "cpu"} if sharding == "full_shard" else {}
    check(ranks.run(2, train, str(tmp_path), 0, STEPS, None, keys), tmp_path)


def passed_over(sharding: str) -> list[float]:
    """A step that is not accepted, between others; the norms."""
    engine = engine_of({"sharding": sharding})
    steps(engine, 0, 1)
    before = held(engine)
    rank = dist.get_rank()
    part = batch_of(1).rows(rank * 4, rank * 4 + 4)
    norms = []
    for accept in (False, True):
        engine.forward_backward(part)
        norms.append(engine.gradient_norm())
        engine.step(accept)
        same = [torch.equal(x, before[n]) for n, x in held(engine).items()]
        assert all(same) if not accept else not (same and all(same))
    engine.close()
    return norms


@pytest.mark.parametrize("sharding", ZERO)
def test_a_step_that_is_not_accepted_leaves_no_trace(ranks: Ranks, sharding: str) -> None:
    for first, second in ranks.run(2, passed_over, sharding):
        assert first == pytest.approx(second, rel=1e-6)


def not_finite(sharding: str) -> None:
    engine = engine_of({"sharding": sharding})
    part = batch_of(0).rows(0, 4)
    engine.forward_backward(part)
    (stage,) = engine.stages
    plain, stage.loss = stage.loss, lambda *a: [x * float("inf") for x in plain(*a)]
    engine.gradient_norm()
    engine.step(accept=True)
    before = held(engine)
    engine.forward_backward(part)
    assert not torch.tensor(engine.gradient_norm()).isfinite()
    engine.step(accept=False)
    assert all(torch.equal(x, before[n]) for n, x in held(engine).items())
    stage.loss = plain
    engine.forward_backward(part)
    assert torch.tensor(engine.gradient_norm()).isfinite()
    engine.close()


@pytest.mark.parametrize("sharding", ["zero1", "full_shard"])
def test_a_norm_that_is_not_finite_is_told(ranks: Ranks, sharding: str) -> None:
    ranks.run(2, not_finite, sharding)


@pytest.mark.parametrize("sharding", ZERO)
def test_checkpoints_go_from_one_engine_to_the_other(
    ranks: Ranks, tmp_path: Path, sharding: str
) -> None:
    """Two steps in one process, two under DeepSpeed, one in one process again."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    engine = alone()
    losses = steps(engine, 0, 2)
    first = save(engine, folders[0])
    start = (str(folders[0]), merge([first["index"]]), first["values"])
    found = ranks.run(2, train, str(folders[1]), 2, 4, start, {"sharding": sharding})
    losses += found[0]["steps"]
    engine = alone()
    engine.load_state(reader_of(folders[1], found), found[0]["values"])
    losses += steps(engine, 4, STEPS)
    for (loss, norm, _), (x, n, _) in zip(losses, expected()["steps"], strict=True):
        assert loss == pytest.approx(x, abs=1e-5)
        assert norm == pytest.approx(n, rel=1e-5)


def adopted(folder: str, index: Any) -> tuple[float, int]:
    engine = engine_of({"sharding": "full_shard"})
    engine.adopt(PieceReader(Path(folder), index))
    found = engine.forward(batch_of(99))
    engine.close()
    return found


def test_the_weights_of_another_run_are_taken(ranks: Ranks, tmp_path: Path) -> None:
    engine = alone()
    steps(engine, 0, 2)
    saved = save(engine, tmp_path)
    total, targets = engine.forward(batch_of(99))
    for found in ranks.run(2, adopted, str(tmp_path), merge([saved["index"]])):
        assert found[1] == targets
        assert found[0] / targets == pytest.approx(total / targets, abs=1e-5)


def from_meta(keys: dict[str, Any], folder: str, index: Any) -> list[float]:
    """The model is never whole on a rank."""
    model = model_of()
    with torch.device("meta"):
        empty = type(model)(model.config).train()
    for name, buffer in model.named_buffers():  # what depends on the shape alone
        empty.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
    weights = Below("model", PieceReader(Path(folder), index))
    engine = engine_of({"sharding": "full_shard", **keys}, model=empty, weights=weights)
    found = [loss for loss, _, _ in steps(engine, 0, STEPS)]
    engine.close()
    return found


@pytest.mark.usefixtures("host_adam")
@pytest.mark.parametrize("place", ["none", "cpu"])
def test_a_model_on_the_meta_device_is_filled_in_parts(
    ranks: Ranks, tmp_path: Path, place: str
) -> None:
    engine = alone()
    saved = save(engine, tmp_path)
    right = [loss for loss, _, _ in expected()["steps"]]
    keys = {"offload_parameters": place, "offload_optimizer": place}
    for found in ranks.run(2, from_meta, keys, str(tmp_path), merge([saved["index"]])):
        assert found == pytest.approx(right, abs=1e-5)


def test_one_process_takes_its_weights_in_parts() -> None:
    """In a process group that is there before them, and gone in the end."""
    shape = model_of().config
    layout = Layout(2, 4, engine="deepspeed", sharding="full_shard")
    weights = SeededWeights(shape, 1)
    engine = build_engine(
        config_of("adamw"), layout, model_on_meta(shape), CPU, 10, Events(), weights
    )
    found = [loss for loss, _, _ in steps(engine, 0, STEPS)]
    engine.close()
    assert found == pytest.approx([loss for loss, _, _ in expected()["steps"]], abs=1e-5)
    assert not dist.is_initialized()


def test_an_engine_that_cannot_be_made_leaves_no_group(tmp_path: Path) -> None:
    layout = Layout(2, 4, engine="deepspeed", sharding="full_shard", offload_parameters="nvme")
    memory = {"offload": {"parameters": "nvme", "path": str(tmp_path / "missing")}}
    shape = model_of().config
    config, weights = config_of("adamw", memory=memory), SeededWeights(shape, 1)
    with pytest.raises(RequestError, match="missing"):
        build_engine(config, layout, model_on_meta(shape), CPU, 10, Events(), weights)
    assert not dist.is_initialized()


def losses_of(keys: dict[str, Any], *arguments: Any, **more: Any) -> list[float]:
    engine = engine_of(keys, *arguments, **more)
    found = [loss for loss, _, _ in steps(engine, 0, STEPS)]
    engine.close()
    return found


@pytest.mark.parametrize("sharding", ["no_shard", "full_shard"])
def test_tied_embeddings(ranks: Ranks, sharding: str) -> None:
    right = [loss for loss, _, _ in steps(alone(tied=True), 0, STEPS)]
    for found in ranks.run(2, losses_of_tied, {"sharding": sharding}):
        assert found == pytest.approx(right, abs=1e-5)


def losses_of_tied(keys: dict[str, Any]) -> list[float]:
    return losses_of(keys, tied=True)


@pytest.mark.parametrize(
    ("compute", "sharding", "near"),
    [
        ("bf16", "shard_grad_op", 1e-3),
        ("bf16", "full_shard", 1e-3),
        ("bf16_pure", "zero1", 0.05),
        ("bf16_pure", "full_shard", 0.05),
        ("fp16", "zero1", 0.01),
    ],
)
def test_half_precision_is_near(ranks: Ranks, compute: str, sharding: str, near: float) -> None:
    """bf16 is the torch engine's: autocast over float32 weights."""
    right = [
        loss for loss, _, _ in steps(alone(compute=compute if near < 0.01 else "fp32"), 0, STEPS)
    ]
    for found in ranks.run(2, losses_of, {"sharding": sharding, "compute": compute}):
        assert found == pytest.approx(right, abs=near)


def train_as_the_guide(
    path: str, hidden: int, vocabulary: int, compute: str, nvme: str | None
) -> dict[str, Any]:
    """Two steps as a file says, state written and taken back; the losses, and where weights
    and states were kept meanwhile."""
    user = read_deepspeed(path)
    keys = {**layout_keys(user), "micro_batch": 4, "accumulation": 8, "compute": compute}
    engine = engine_of(
        keys, user=user, clip=1.0, samples=64, nvme=nvme, hidden=hidden, vocabulary=vocabulary
    )
    found = []
    for step in range(2):
        part = batch_of(step, 8).rows(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        total, targets = engine.forward_backward(part)
        engine.gradient_norm()
        engine.step(accept=True)
        found.append(total / targets)
    swapped = sorted(str(p) for p in Path(nvme).rglob("*.swp")) if nvme else []
    saved = save(engine, Path(path).parent)
    before = engine.forward(batch_of(5, 8))
    index: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(index, saved["index"])
    engine.load_state(PieceReader(Path(path).parent, merge(index)), saved["values"])
    after = engine.forward(batch_of(5, 8))
    engine.close()
    return {"losses": found, "swapped": swapped, "before": before, "after": after}


def one_process(hidden: int, vocabulary: int) -> list[float]:
    engine = alone(hidden=hidden, vocabulary=vocabulary)
    engine.clip = 1.0
    found = []
    for step in range(2):
        total, targets = engine.forward_backward(batch_of(step, 8))
        engine.gradient_norm()
        engine.step(accept=True)
        found.append(total / targets)
    return found


@pytest.mark.usefixtures("host_adam")
def test_the_guides_file_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(GUIDE)
    for found in ranks.run(2, train_as_the_guide, str(path), 32, VOCABULARY, "bf16", None):
        assert found["losses"] == pytest.approx(one_process(32, VOCABULARY), abs=0.05)
        assert found["after"] == pytest.approx(found["before"], rel=1e-3)


@pytest.mark.usefixtures("swapping")
def test_the_guides_file_on_nvme(ranks: Ranks, tmp_path: Path) -> None:
    """In float32, so that it is one process to the digit; the model is as large as it must be
    for DeepSpeed to swap at all (1 MiB a rank)."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    device = json.dumps({"device": "nvme", "nvme_path": str(nvme)})
    text = GUIDE.replace('{"device": "cpu"}', device).replace("true},", "false},")
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    for found in ranks.run(2, train_as_the_guide, str(path), 64, 8192, "fp32", str(nvme)):
        assert found["losses"] == pytest.approx(one_process(64, 8192), abs=1e-5)
        assert found["after"] == pytest.approx(found["before"], rel=1e-6)
        assert found["swapped"]


def nvme_refusals(folder: str, missing: str) -> list[str]:
    """What is said of a folder that is not there, and of a model that is too large for it."""
    import_deepspeed(CPU)
    said = []
    for path, parameters in ((missing, 1), (folder, 10**18)):
        asked = {"offload_optimizer": {"device": "nvme", "nvme_path": path}}
        with pytest.raises(RequestError) as caught:
            check_nvme({"zero_optimization": asked}, parameters)
        said.append(str(caught.value))
    return said


def test_an_nvme_folder_that_will_not_do(ranks: Ranks, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    (first, second) = ranks.run(1, nvme_refusals, str(tmp_path), missing)[0]
    assert missing in first
    assert "memory.offload.optimizer" in first
    assert "GB free" in second


def test_muon_and_adafactor_are_refused() -> None:
    """Before anything is built."""
    layout = Layout(SAMPLES, 1, engine="deepspeed")
    for name in ("muon", "adafactor"):
        with pytest.raises(RequestError, match=f"optimizer.name = {name}.*adamw.*engine: torch"):
            check_layout(config_of(name), layout, model_of().config)
