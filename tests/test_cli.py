"""The command line as a user meets it: exit codes, what is said, what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rostra import Run
from support import REPOSITORY, Done, ended, refused, rostra, start

Tiny = Callable[..., dict[str, Any]]


def answer(done: Done) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps(values, indent=1))
    return path


def test_a_run_from_text_to_text(tiny: Tiny, tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", tiny())
    done = ended(start("train", config, "--set", "train.steps=7", "--json"))
    summary = answer(done)
    assert summary["steps"] == 7
    assert "step 7/7" in done.stderr
    found = answer(rostra("evaluate", tmp_path / "run", "--json"))
    assert found["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-5)
    asked = ("--prompt", "the sun", "--tokens", "9", "--json")
    assert answer(rostra("generate", tmp_path / "run", *asked))["prompt"] == "the sun"
    again = rostra("train", config, "--set", "train.steps=7")
    assert again.returncode == 0
    assert "finished" in again.stderr
    assert "rostra generate" in again.stdout


def test_prepare_makes_shards_and_the_second_time_finds_them(tiny: Tiny, tmp_path: Path) -> None:
    values = tiny(data={"cache": str(tmp_path / "cache")})
    config = write(tmp_path / "run.yaml", values)
    first = answer(rostra("prepare", config, "--json"))
    assert first["train"]["documents"] + first["held_out"]["documents"] == 40
    times = {p: p.stat().st_mtime_ns for p in Path(first["path"]).rglob("*") if p.is_file()}
    assert answer(rostra("prepare", config, "--json")) == first
    assert times == {p: p.stat().st_mtime_ns for p in Path(first["path"]).rglob("*") if p.is_file()}


def test_the_schema_is_the_one_in_the_repository() -> None:
    printed = answer(rostra("schema"))
    assert printed == json.loads((REPOSITORY / "docs" / "schema.json").read_text())
    assert set(printed["properties"]) >= {"run", "model", "data", "train", "parallel", "serve"}


def test_the_doctor_tells_what_is_missing() -> None:
    report = answer(rostra("doctor", "--json"))
    names = {check["name"] for check in report["checks"]}
    assert {"GPU", "C++ compiler"} <= names
    assert all(check["get"] for check in report["checks"])
    assert "processor" in rostra("doctor").stdout


# Each case: what is changed in a good config, what the message must hold.
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown key": ({"train": {"step": 3}}, ("train.step = 3", "did you mean `steps`")),
    "missing file": (
        {"data": {"sources": [{"type": "text", "path": "nowhere.txt"}]}},
        ("nowhere.txt", "data.sources.0.path"),
    ),
    "empty file": ({"data": {"sources": [{"type": "text", "path": "empty.txt"}]}}, ("empty.txt",)),
    "binary file": (
        {"data": {"sources": [{"type": "text", "path": "binary.txt"}]}},
        ("binary.txt", "binary"),
    ),
    "undecodable file": (
        {"data": {"sources": [{"type": "text", "path": "latin.txt"}]}},
        ("latin.txt", "byte 3", "data.sources.0.encoding"),
    ),
    "short corpus": (
        {"data": {"sources": [{"type": "text", "path": "short.txt"}], "held_out": 0}},
        ("33", "data.sequence_length"),
    ),
    "tokenizer that does not fit": (
        {"model": {"preset": None, "pretrained": "model"}, "data": {}},
        ("data.tokenizer", "embeddings"),
    ),
    "no such model": (
        {"model": {"preset": None, "pretrained": "./nothing"}},
        ("./nothing",),
    ),
    "no such preset": ({"model": {"preset": "llama-9t"}}, ("llama-9t", "demosthenes")),
    "heads that do not divide": (
        {"model": {"size": {"heads": 3, "kv_heads": 3}}},
        ("heads", "hidden_size"),
    ),
    "sequence too long for the model": (
        {"model": {"size": {"positions": 16}}},
        ("data.sequence_length = 32", "16"),
    ),
}


@pytest.fixture
def workplace(tmp_path: Path, tiny: Tiny) -> Path:
    """A folder with every kind of bad file, and a model of 200 tokens."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"abc\0def" * 100)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "short.txt").write_text("a b")
    values = tiny(run={"output": str(tmp_path / "small")})
    values["data"]["tokenizer"] = {"vocabulary": 260}
    run = Run.open(values)
    run.train()
    (run.path / "model").rename(tmp_path / "model")
    return tmp_path


def test_bad_requests_are_refused_and_leave_nothing(workplace: Path, tiny: Tiny) -> None:
    for case, (changes, said) in BAD.items():
        values = tiny(**changes)
        values["run"]["output"] = "runs/bad"
        done = rostra("train", write(workplace / "bad.yaml", values), cwd=workplace)
        try:
            refused(done, *said)
            assert not (workplace / "runs").exists()
        except AssertionError as error:
            pytest.fail(f"{case}: {error}\n{done.stderr}")


def test_bad_files_are_skipped_where_the_config_says_so(workplace: Path, tiny: Tiny) -> None:
    (workplace / "good.txt").write_text("the sun rose over a quiet harbour. " * 200)
    values = tiny(data={"on_bad_record": "skip", "held_out": 0})
    values["data"]["sources"] = [{"type": "text", "path": "*.txt"}]
    values["run"]["output"] = "runs/skips"
    done = rostra("train", write(workplace / "skip.yaml", values), cwd=workplace)
    assert done.returncode == 0, done.stderr
    for name in ("empty.txt", "binary.txt", "latin.txt"):
        assert name in done.stderr
    assert "good.txt" not in done.stderr


def test_a_corrupt_shard_is_found_by_its_hash(tiny: Tiny, tmp_path: Path) -> None:
    values = tiny(data={"cache": str(tmp_path / "cache")})
    config = write(tmp_path / "run.yaml", values)
    folder = Path(answer(rostra("prepare", config, "--json"))["path"])
    shard = folder / "train-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    refused(rostra("train", config), str(shard), "corrupt")
    assert not (tmp_path / "run").exists()
    shard.unlink()  # what the message says to do
    assert rostra("train", config).returncode == 0


def test_a_folder_in_use_or_of_something_else_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", tiny())
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    refused(rostra("train", config), "thesis.tex", "run.output")
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]
    (folder / "thesis.tex").unlink()
    from rostra.store import Lock

    with Lock(folder):
        refused(rostra("train", config), f"in use by process {os.getpid()}")


def test_a_full_disk_keeps_what_was_complete(tiny: Tiny, tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the same error from the system."""
    run = Run.open(tiny())
    run.train()
    longer = write(tmp_path / "run.yaml", tiny(train={"steps": 12}))
    program = """
        import resource, runpy, signal, sys
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        sys.argv = ["rostra", "train", sys.argv[1]]
        runpy.run_module("rostra.cli", run_name="__main__")
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(longer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    refused(done, "the disk is full", "run.output")
    assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == ["step-5", "step-6"]
    assert rostra("train", longer).returncode == 0


def test_a_model_of_pickles_is_refused_with_the_way_to_convert(
    tiny: Tiny, tmp_path: Path, workplace: Path
) -> None:
    for weights in (workplace / "model").glob("*.safetensors"):
        weights.rename(weights.with_name("pytorch_model.bin"))
    values = tiny(model={"preset": None, "pretrained": str(workplace / "model")})
    del values["data"]["tokenizer"]
    refused(rostra("train", write(tmp_path / "bin.yaml", values)), "pickles", "save_pretrained")


def test_a_pretrained_model_trains_on_with_its_own_tokenizer(
    tiny: Tiny, tmp_path: Path, workplace: Path
) -> None:
    values = tiny(model={"preset": None, "pretrained": str(workplace / "model")})
    del values["data"]["tokenizer"]
    run = Run.open(values)
    run.train()
    before = AutoTokenizer.from_pretrained(workplace / "model")
    after = AutoTokenizer.from_pretrained(run.path / "model")
    assert after.get_vocab() == before.get_vocab()


def test_a_terminal_gets_a_bar_and_a_pipe_plain_lines(tiny: Tiny, tmp_path: Path) -> None:
    import pty

    config = write(tmp_path / "run.yaml", tiny())
    own, theirs = pty.openpty()
    command = [sys.executable, "-m", "rostra.cli", "train", str(config)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(own, 65536):
            shown += part
    except OSError:  # the other end was closed
        pass
    assert process.wait(timeout=60) == 0
    assert b"\x1b[" in shown
    assert "\x1b[" not in rostra("train", config, "--set", "train.steps=8").stderr
