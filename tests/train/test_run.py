"""Whole runs on a tiny model: what is left behind, resuming, stopping, refusing."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_same_run, losses, of_kind, write
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rostra import RequestError, Run, Sampling
from rostra.checkpoint import Checkpoint, newest_checkpoint, open_checkpoint
from rostra.errors import TrainingFailed
from rostra.events import Event, read_events
from rostra.hardware import can_compile
from rostra.store import RunFolder, read_manifest
from support import ended, need, start, tiny_run, wait_for_steps

Tiny = Callable[..., dict[str, Any]]

# What scripts rely on; more keys are welcome.
SUMMARY = {
    "steps", "tokens", "loss", "eval_loss", "bits_per_byte", "tokens_per_second",
    "peak_memory_bytes", "planned_peak_memory_bytes", "layout", "parameters",
    "trainable_parameters",
}  # fmt: skip


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole."""
    reader = checkpoint.reader()
    shapes = {name: reader.shape(name) for name in reader.names()}
    return {name: reader.read(name, (0,) * len(x), x) for name, x in shapes.items()}


def interrupt(run: Run, at: int, **more: Any) -> None:
    """Train until step `at` and break off, as a crash would."""

    def crash(event: Event) -> None:
        if event.kind == "step" and event["step"] == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.train([crash], **more)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that is over, for tests that only read it."""
    run = Run.open(tiny_run(corpus, tmp_path_factory.mktemp("trained") / "run"))
    run.train()
    return run


def test_a_run_leaves_all_its_parts(tiny: Tiny) -> None:
    values = tiny(
        train={"steps": 12},
        evaluate={"every": 5, "prompt": "the", "compare_xz": True},
        monitor={"tensorboard": True},
    )
    run = Run.open(values)
    summary = run.train()
    assert summary.keys() >= SUMMARY
    assert summary == json.loads((run.path / "summary.json").read_text())
    assert summary["steps"] == 12
    # 4 samples of 32 positions; the last token of a document has no target.
    assert 12 * 4 * 30 <= summary["tokens"] <= 12 * 4 * 32
    assert summary["xz_bits_per_byte"] > summary["xz_whole_bits_per_byte"] > 0
    held = 4 * summary["parameters"]
    assert held <= summary["memory_bytes"]["parameters"] < 1.01 * held  # a few buffers
    assert summary["peak_memory_bytes"] > 4 * held
    for name in ("config.yaml", "plan.json", "report.html", "tensorboard", "model"):
        assert (run.path / name).exists(), name
    assert not (run.path / "lock.json").exists()
    kinds = [event.kind for event in read_events(run.path / "events.jsonl")]
    assert kinds.count("step") == 12
    assert kinds.count("evaluation") == 3
    assert kinds.count("generation") == 3
    found = losses(run.path)
    assert found[12] < found[1] - 0.1


def test_the_final_model_loads_in_transformers_with_equal_logits(trained: Run) -> None:
    run = trained
    tensors = tensors_of(open_checkpoint(RunFolder(run.path).checkpoint(6)))
    model = AutoModelForCausalLM.from_pretrained(run.path / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[f"model/{name}"]), name
    tokenizer = AutoTokenizer.from_pretrained(run.path / "model")
    ids = tokenizer("the sun rose", return_tensors="pt").input_ids
    from rostra.generate import load_for_generation

    ours, _ = load_for_generation(str(run.path))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, ours(ids).logits)


OPTIMIZERS = ("adamw", "sgd", "adafactor", "lion", "muon")
RESUMED: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": {"name": name}} for name in OPTIMIZERS},
    **{name: {"precision": {"compute": name}} for name in ("bf16", "fp16", "bf16_pure")},
}


@pytest.mark.parametrize("changed", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_is_bit_identical(
    tiny: Tiny, tmp_path: Path, changed: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {
        "model": {"preset": "tiny", "size": {"dropout": 0.1}},
        "train": {"steps": 5},
        "checkpoint": {"every": 2},
        **changed,
    }
    whole = Run.open(tiny(**sections, run={"output": str(tmp_path / "whole")}))
    whole.train()
    cut = Run.open(tiny(**sections))
    interrupt(cut, at=3)
    assert RunFolder(cut.path).steps() == [2]
    cut.train()
    assert_same_run(whole.path, cut.path)


def test_a_resumed_compiled_run_is_bit_identical(tiny: Tiny, tmp_path: Path) -> None:
    need(can_compile(torch.device("cpu")), "a C++ compiler, or Python's headers,")
    sections: dict[str, Any] = {
        "precision": {"compute": "bf16"},
        "train": {"steps": 5, "compile": True},
        "checkpoint": {"every": 2},
    }
    whole = Run.open(tiny(**sections, run={"output": str(tmp_path / "whole")}))
    whole.train()
    interrupt(Run.open(tiny(**sections)), at=3)
    torch._dynamo.reset()  # as in another process
    sections["train"]["compile"] = False  # the run keeps its own choice
    cut = Run.open(tiny(**sections))
    cut.train()
    assert [event["layout"]["compile"] for event in of_kind(cut.path, "started")] == [True, True]
    assert_same_run(whole.path, cut.path)


def test_a_signal_saves_and_the_same_command_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    """Ctrl-C; SIGTERM: see `test_ranks_end_to_end.py`."""
    config = write(tmp_path / "run.yaml", tiny(train={"steps": 3000}))
    process = start("train", config)
    wait_for_steps(tmp_path / "run", process, 5)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.returncode == 75, done.stderr
    assert "start the same command again" in done.stderr
    folder = RunFolder(tmp_path / "run")
    (step,) = folder.steps()
    assert read_manifest(folder.checkpoint(step)) is not None
    assert Run.open(config, [f"train.steps={step + 2}"]).train()["steps"] == step + 2


def kill_and_go_on(config: Path, folder: Path, kills: int) -> int:
    """Kill the run at random moments until it has been killed `kills` times, then let it
    finish; returns how often a kill fell into the writing of a checkpoint."""
    chance = random.Random(kills)
    writing = 0
    for number in range(kills):
        before = (folder / "events.jsonl").read_text().count("\n") if folder.exists() else 0
        process = start("train", config)
        wait_for_lines(folder, process, before + chance.randint(2, 12))
        writing += number % 2 == 0 and wait_for_writing(folder, process)
        assert process.poll() is None, process.communicate()[1]
        process.kill()
        process.communicate()
    Run.open(config).train()
    return writing


def wait_for_lines(folder: Path, process: subprocess.Popen[str], lines: int) -> None:
    path = folder / "events.jsonl"
    while process.poll() is None and not (path.exists() and path.read_text().count("\n") > lines):
        time.sleep(0.005)


def wait_for_writing(folder: Path, process: subprocess.Popen[str]) -> bool:
    end = time.time() + 30
    while process.poll() is None and time.time() < end:
        if list((folder / "checkpoints").glob(".step-*.aside")):
            return True
    return False


def _killed_runs(tiny: Tiny, tmp_path: Path, kills: int, steps: int) -> None:
    sections: dict[str, Any] = {"train": {"steps": steps}, "checkpoint": {"every": 2}}
    whole = Run.open(tiny(**sections, run={"output": str(tmp_path / "whole")}))
    whole.train()
    config = write(tmp_path / "killed.yaml", tiny(**sections))
    writing = kill_and_go_on(config, tmp_path / "run", kills)
    assert writing > 0, "no kill fell into the writing of a checkpoint"
    assert_same_run(whole.path, tmp_path / "run")


def test_kill_9_loses_nothing(tiny: Tiny, tmp_path: Path) -> None:
    _killed_runs(tiny, tmp_path, kills=2, steps=60)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_kill_9_at_twenty_moments_loses_nothing(tiny: Tiny, tmp_path: Path) -> None:
    _killed_runs(tiny, tmp_path, kills=20, steps=400)


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tiny: Tiny, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"steps": 7}, "checkpoint": {"every": 2, "keep": 9}}
    whole = Run.open(tiny(**sections, run={"output": str(tmp_path / "whole")}))
    whole.train()
    hurt = Run.open(tiny(**sections, run={"output": str(tmp_path / "hurt")}))
    interrupt(hurt, at=5)
    folder = RunFolder(hurt.path)
    path = folder.checkpoint(4) / "part-0.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    notices: list[str] = []
    hurt.train([lambda e: notices.append(e["message"]) if e.kind == "notice" else None])
    assert any("step-4: damaged" in notice for notice in notices)
    assert open_checkpoint(folder.checkpoint(4)).position.step == 4  # written again, whole
    assert (folder.checkpoints / "damaged-step-4").exists()
    assert_same_run(whole.path, hurt.path)


def test_a_finished_run_says_so_and_a_longer_one_goes_on(tiny: Tiny) -> None:
    constant = {"name": "constant", "warmup": 0}
    run = Run.open(tiny(schedule=constant))
    summary = run.train()
    said: list[Event] = []
    assert run.train([said.append]) == summary
    assert [e.kind for e in said] == ["notice"]
    assert "finished" in said[0]["message"]
    longer = Run.open(tiny(schedule=constant, train={"steps": 9}))
    assert longer.train()["steps"] == 9
    assert read_manifest(run.path / "model")["step"] == 9  # type: ignore[index]


def test_a_longer_run_killed_on_its_way_is_not_taken_for_finished(tiny: Tiny) -> None:
    Run.open(tiny()).train()
    longer = Run.open(tiny(train={"steps": 9}, checkpoint={"every": 50}))
    interrupt(longer, at=8)
    assert longer.train()["steps"] == 9


def test_only_what_is_its_own_is_removed_from_a_folder(tiny: Tiny, tmp_path: Path) -> None:
    values = tiny()
    values["data"]["sources"] = [{"type": "text", "path": "nowhere"}]
    folder = Path(values["run"]["output"])
    folder.mkdir()
    with pytest.raises(RequestError, match="nowhere"):
        Run.open(values).train()
    assert list(folder.iterdir()) == []
    (folder / ".git").mkdir()
    with pytest.raises(RequestError, match=r"holds \.git and is no run"):
        Run.open(values).train()
    assert (folder / ".git").exists()


def test_resuming_refuses_other_data_and_a_shorter_run(tiny: Tiny, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(9):
        (texts / f"{number}.txt").write_text(f"the sun rose over harbour {number}. " * 50)
    source = {"sources": [{"type": "text", "path": str(texts)}]}
    run = Run.open(tiny(data=source))
    run.train()
    model = (run.path / "model" / "manifest.json").read_text()
    with pytest.raises(RequestError, match="has done 6 steps, and 3 are asked for"):
        Run.open(tiny(data=source, train={"steps": 3})).train()
    (texts / "3.txt").write_text("something else altogether " * 50)
    with pytest.raises(RequestError, match="changed since this run was started"):
        Run.open(tiny(data=source, train={"steps": 9})).train()
    with pytest.raises(RequestError, match="changed since this run was started"):
        Run.open(run.path).evaluate()
    other = tiny(data=source, run={"output": str(tmp_path / "other")})
    with pytest.raises(RequestError, match="its tokenizer is another"):
        Run.open(other).train(origin=str(run.path))
    other["data"]["tokenizer"] = {"pretrained": str(run.path / "model")}
    Run.open(other).train(origin=str(run.path))
    assert (run.path / "model" / "manifest.json").read_text() == model


def test_resuming_refuses_what_would_change_the_past(tiny: Tiny) -> None:
    run = Run.open(tiny())
    run.train()
    with pytest.raises(RequestError) as caught:
        Run.open(tiny(optimizer={"learning_rate": 1e-5}, run={"seed": 3})).train()
    message = str(caught.value)
    assert "optimizer.learning_rate: 0.0003 in" in message
    assert "1e-05 asked for" in message
    assert "run.seed: 0 in" in message
    assert "--new-learning-rate" in message
    changed = Run.open(tiny(optimizer={"learning_rate": 1e-5}, train={"steps": 8}))
    rates: list[float] = []
    changed.train(
        [lambda e: rates.append(e["learning_rate"]) if e.kind == "step" else None],
        new_learning_rate=True,
    )
    assert len(rates) == 2
    assert max(rates) <= 1e-5


def test_a_run_starts_from_anothers_weights(tiny: Tiny, tmp_path: Path) -> None:
    first = Run.open(tiny(checkpoint={"every": 3, "keep": 5}, train={"steps": 12}))
    first.train()
    branch = Run.open(tiny(run={"output": str(tmp_path / "branch")}, schedule={"warmup": 0}))
    branch.train(origin=f"{first.path}@9")
    assert losses(branch.path)[1] < losses(first.path)[1] - 0.05
    with pytest.raises(RequestError, match="its checkpoints are: 3, 6, 9, 12"):
        other = Run.open(tiny(run={"output": str(tmp_path / "other")}))
        other.train(origin=f"{first.path}@5")
    assert not (tmp_path / "other").exists()


def test_a_branch_killed_before_its_first_checkpoint_still_starts_from_its_origin(
    tiny: Tiny, tmp_path: Path
) -> None:
    first = Run.open(tiny(train={"steps": 8}))
    first.train()
    values = tiny(run={"output": str(tmp_path / "branch")}, checkpoint={"every": 5})
    whole = tiny(run={"output": str(tmp_path / "whole")}, checkpoint={"every": 5})
    Run.open(whole).train(origin=str(first.path))
    branch = Run.open(values)
    interrupt(branch, at=3, origin=str(first.path))
    branch.train()
    assert_same_run(tmp_path / "whole", branch.path)
    branch.train(origin=str(first.path))  # the same command again is no mistake
    with pytest.raises(RequestError, match="--from starts a new run"):
        branch.train(origin=f"{first.path}@8")


def test_a_run_without_a_whole_checkpoint_is_never_overwritten(tiny: Tiny) -> None:
    run = Run.open(tiny(checkpoint={"keep": 1}))
    run.train()
    path = RunFolder(run.path).checkpoint(6) / "state.json"
    path.write_text(path.read_text().replace("6", "7", 1))
    with pytest.raises(RequestError, match="none of its checkpoints is whole"):
        Run.open(tiny(checkpoint={"keep": 1}, train={"steps": 9})).train()


def test_a_finished_run_needs_no_checkpoint_to_say_so(tiny: Tiny) -> None:
    run = Run.open(tiny())
    summary = run.train()
    shutil.rmtree(run.path / "checkpoints")
    assert run.train() == summary
    with pytest.raises(RequestError, match="started with another config"):
        Run.open(tiny(run={"seed": 5})).train()


def test_a_branch_with_its_optimizer_goes_on_where_the_run_stood(
    tiny: Tiny, tmp_path: Path
) -> None:
    """From a constant schedule, on the same data, the branch's weights after its first step
    are those that the run itself had after seeing that data with the same optimizer state."""
    constant = {"schedule": {"name": "constant", "warmup": 0}}
    first = Run.open(tiny(**constant, train={"steps": 4}))
    first.train()
    branch = Run.open(tiny(**constant, run={"output": str(tmp_path / "b")}, train={"steps": 2}))
    branch.train(origin=str(first.path), with_optimizer=True)
    found, _ = newest_checkpoint(RunFolder(branch.path))
    assert found is not None
    steps = {k: v for k, v in tensors_of(found).items() if k.endswith("/step")}
    assert steps
    assert all(int(value) == 6 for value in steps.values())


def test_training_that_diverges_for_good_exits_4(tiny: Tiny) -> None:
    run = Run.open(
        tiny(
            optimizer={"name": "sgd", "learning_rate": 1e30},
            stability={"clip": None, "bad_steps": 3},
            train={"steps": 50},
            schedule={"warmup": 0},
        )
    )
    with pytest.raises(TrainingFailed, match="4 steps in a row") as caught:
        run.train()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("length", [{"tokens": 500}, {"epochs": 0.5}])
def test_the_length_of_a_run_in_tokens_or_epochs(tiny: Tiny, length: dict[str, Any]) -> None:
    values = tiny()
    del values["train"]["steps"]
    values["train"] |= length
    run = Run.open(values)
    summary = run.train()
    if "tokens" in length:
        assert summary["steps"] == 4  # 128 positions a step
    else:
        tokens = run.prepare().train.tokens
        assert summary["steps"] == math.ceil(0.5 * ((tokens - 1) // 32) / 4)


def test_evaluate_repeats_the_final_evaluation(trained: Run) -> None:
    summary = json.loads((trained.path / "summary.json").read_text())
    found = Run.open(trained.path).evaluate()
    assert found["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(summary["bits_per_byte"], rel=1e-6)


def test_generation_depends_on_its_seed_alone(trained: Run) -> None:
    one = trained.generate("the sun", Sampling(tokens=20, seed=1))
    assert one == trained.generate("the sun", Sampling(tokens=20, seed=1))
    assert one != trained.generate("the sun", Sampling(tokens=20, seed=2))
