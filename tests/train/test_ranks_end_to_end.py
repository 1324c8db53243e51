"""The command line with several ranks: from a config to its final model, stopped, killed, resumed
under another layout."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from runs import assert_same_run, losses, of_kind, weights, write
from transformers import AutoModelForCausalLM

from rostra import Run
from rostra.checkpoint import open_checkpoint
from rostra.layout import Layout
from rostra.store import RunFolder, read_manifest
from support import ended, start, tiny_run, wait_for_steps

STEPS = 40
SHARDED = {"shard": 2}

Values = dict[str, Any]
Make = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def make(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The config file of a run, and the run's folder; keyword arguments replace keys of a
    section, or a section. A global batch of 5 is three samples for one of two ranks."""
    folder = tmp_path_factory.mktemp("runs")

    def make(name: str, **sections: Any) -> tuple[Path, Path]:
        train = {"steps": STEPS, "global_batch_size": 5, **sections.pop("train", {})}
        values = tiny_run(
            corpus,
            folder / name,
            train=train,
            schedule={"name": "constant", "warmup": 0},
            checkpoint={"every": 9, "keep": 100},
            **sections,
        )
        return write(folder / f"{name}.yaml", values), folder / name

    return make


def said(process: subprocess.Popen[str], code: int) -> str:
    """On standard error, once it has ended with `code`."""
    done = ended(process)
    assert done.returncode == code, done.stderr
    return done.stderr


def assert_like(one: Path, two: Path) -> None:
    """Of two layouts: losses in nats, and final weights."""
    assert losses(one) == pytest.approx(losses(two), rel=0, abs=1e-5)
    second = weights(two)
    for name, value in weights(one).items():
        assert float((value - second.pop(name)).abs().max()) < 1e-4, name
    assert not second


def layout_of(path: Path) -> Layout:
    """Of the last start of a run."""
    return Layout.from_dict(of_kind(path, "started")[-1]["layout"])


@pytest.fixture(scope="module")
def alone(make: Make) -> Path:
    """The run by one process."""
    config, folder = make("alone")
    Run.open(config).train()
    return folder


@pytest.fixture(scope="module")
def sharded(make: Make) -> Path:
    """The run by two ranks that the command line starts, as the config asks for."""
    config, folder = make("sharded", parallel=SHARDED)
    said(start("train", config), 0)
    return folder


@pytest.fixture(scope="module")
def stopped(make: Make) -> Path:
    """The sharded run, longer, and stopped by SIGTERM on its way."""
    config, folder = make("stopped", parallel=SHARDED, train={"steps": 3000})
    process = start("train", config)
    wait_for_steps(folder, process, 11)
    process.send_signal(signal.SIGTERM)
    told = said(process, 75)
    assert told.count("start the same command again to go on") == 1, told
    assert "Traceback" not in told
    return folder


def test_two_ranks_train_what_one_process_trains(alone: Path, sharded: Path) -> None:
    assert layout_of(alone).world_size == 1
    assert (layout_of(sharded).shard, layout_of(sharded).sharding) == (2, "full_shard")
    assert_like(sharded, alone)
    one, two = (json.loads((path / "summary.json").read_text()) for path in (alone, sharded))
    assert one.keys() == two.keys()
    assert one["tokens"] == two["tokens"]
    assert one["parameters"] == two["parameters"]
    assert one["bits_per_byte"] == pytest.approx(two["bits_per_byte"], abs=1e-4)
    assert (sharded / "report.html").exists()
    assert not (sharded / "lock.json").exists()


def test_the_memory_of_each_rank_is_told(alone: Path, sharded: Path) -> None:
    (one,), (two,) = of_kind(alone, "memory"), of_kind(sharded, "memory")
    assert len(two["ranks"]) == 2
    for kind in ("parameters", "optimizer"):
        assert two["bytes"][kind] == pytest.approx(one["bytes"][kind] / 2, rel=0.02), kind


def test_the_final_model_is_the_last_checkpoint_and_loads_in_transformers(sharded: Path) -> None:
    checkpoint = open_checkpoint(RunFolder(sharded).checkpoint(STEPS))
    assert checkpoint.ranks == 2
    reader = checkpoint.reader()
    model = AutoModelForCausalLM.from_pretrained(sharded / "model", dtype=torch.float32)
    named = dict(model.named_parameters())
    assert named.keys() == {
        name.removeprefix("model/") for name in reader.names() if name.startswith("model/")
    }
    for name, parameter in named.items():
        shape = tuple(parameter.shape)
        saved = reader.read(f"model/{name}", (0,) * len(shape), shape)
        assert torch.equal(parameter, saved), name


def test_a_stop_is_saved_by_all_ranks_at_one_step(stopped: Path) -> None:
    folder = RunFolder(stopped)
    step = folder.steps()[-1]
    assert of_kind(stopped, "stopped")[-1]["step"] == step == len(losses(stopped))
    manifest = read_manifest(folder.checkpoint(step))
    assert manifest is not None
    assert {"part-0.safetensors", "part-1.safetensors"} <= manifest["files"].keys()
    assert not (stopped / "model").exists()
    assert not (stopped / "lock.json").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_run_goes_on_under_another_layout(ranks: int, make: Make, stopped: Path) -> None:
    """One process; and two ranks that are copies, here under torchrun."""
    end = RunFolder(stopped).steps()[-1] + 5
    config, folder = make(
        f"resumed-{ranks}", train={"steps": end}, parallel={"sharding": "no_shard"}
    )
    shutil.copytree(stopped, folder)
    if ranks == 1:
        Run.open(config).train()
    else:
        torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "-m")
        said(start("train", config, launcher=torchrun), 0)
    layout = layout_of(folder)
    assert (layout.world_size, layout.sharding) == (ranks, "no_shard")
    assert len(losses(folder)) == end
    whole_config, whole = make(f"whole-{ranks}", train={"steps": end})
    Run.open(whole_config).train()
    assert_like(folder, whole)


def kill(config: Path, folder: Path, rank: int, steps: int) -> None:
    """Start the run, and kill one of its two ranks once so many steps are told of in all."""
    process = start("train", config)
    wait_for_steps(folder, process, steps)
    ranks = psutil.Process(process.pid).children()
    (chosen,) = [each for each in ranks if each.environ().get("RANK") == str(rank)]
    chosen.kill()
    told = said(process, 4)
    assert f"rostra: rank {rank} of 2" in told
    assert "was killed by SIGKILL" in told
    assert not any(each.is_running() for each in ranks)


def test_a_killed_rank_ends_the_run_and_loses_nothing(make: Make, sharded: Path) -> None:
    config, folder = make("killed", parallel=SHARDED)
    kill(config, folder, 1, 20)
    assert RunFolder(folder).steps()[-1] < STEPS
    said(start("train", config), 0)
    assert of_kind(folder, "started")[-1]["step"] > 0
    assert_same_run(folder, sharded)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_either_rank_killed_again_and_again_loses_nothing(make: Make) -> None:
    long: Values = {"parallel": SHARDED, "train": {"steps": 200}}
    config, folder = make("killed-often", **long)
    for number in range(8):
        kill(config, folder, number % 2, 15 * (number + 1))
    said(start("train", config), 0)
    whole_config, whole = make("never-killed", **long)
    said(start("train", whole_config), 0)
    assert_same_run(folder, whole)
