"""Every example config and every command in README and docs runs here."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rostra.config import read_config
from support import REPOSITORY, Done, rostra

EXAMPLES = sorted((REPOSITORY / "examples").rglob("*.yaml"))
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

# Commands that a test cannot run as they are, and why.
NOT_RUN = {
    "make quickstart": "installs, then trains for minutes; the same verb runs here, shrunk",
    "make test": "is what runs this",
    **dict.fromkeys(
        ("rostra calibrate", "rostra calibrate --json"),
        "measures for a minute; tests/plan/test_calibrate.py has the verb, and measures less",
    ),
    "torchrun --nproc-per-node 8 -m rostra.cli train run.yaml": "a machine with 8 GPUs; a real "
    "torchrun is in tests/train/test_ranks_end_to_end.py",
    "srun --ntasks-per-node 8 rostra train run.yaml": "a cluster; tests/workers/test_world.py has "
    "what Slurm sets",
}
# What makes a documented training short; its verb, config and options stay as documented.
SHRUNK = [
    "model.preset=tiny", "data.tokenizer.vocabulary=400", "data.sequence_length=64",
    "train.steps=4", "train.epochs=null", "evaluate.compare_xz=false", "train.compile=false",
    "evaluate.every=null",
]  # fmt: skip

TUNED = ["train.steps=4", "train.epochs=null", "train.compile=false", "data.sequence_length=512"]


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            found += [line.split("  #")[0].strip() for line in block.splitlines() if line.strip()]
    return found


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and a few books, where commands run one after another."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    (folder / "books").mkdir()
    for number in range(12):
        text = f"It was a quiet harbour, number {number}, and small boats went out to sea. " * 40
        (folder / "books" / f"{number + 10}-0.txt").write_text(text)
    return folder


def run(command: str, cwd: Path) -> Done:
    words = shlex.split(command)
    assert words[0] == "rostra"
    if "examples/tune.yaml" in words and words[1] == "train":
        words += [word for change in TUNED for word in ("--set", change)]
    elif words[1] in ("train", "prepare"):
        source = "data.sources.0={type: gutenberg, path: books}"
        words += [word for change in [*SHRUNK, source] for word in ("--set", change)]
    return rostra(*words[1:], cwd=cwd)


def test_every_command_of_the_documents_runs(workplace: Path) -> None:
    ran = 0
    for command in commands():
        if command in NOT_RUN:
            continue
        done = run(command, workplace)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        if "--json" in command:
            json.loads(done.stdout)
        ran += 1
    assert ran == 19
    assert len(commands()) == ran + 7


def test_every_example_is_a_valid_config() -> None:
    for path in EXAMPLES:
        read_config(path)
    assert len(EXAMPLES) == 4


def test_the_readmes_yaml_is_a_valid_config(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    for block in blocks:
        path = tmp_path / "readme.yaml"
        path.write_text(block)
        read_config(path)
    assert len(blocks) == 1


def test_the_readmes_python_runs(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    asked = ["run.name=short", "train.steps=100"]
    changes = [*asked[:1], *SHRUNK, "data.sources.0={type: gutenberg, path: books}"]
    program = block.replace(json.dumps(asked), repr(changes))
    assert program != block
    monkeypatch.chdir(workplace)
    exec(program, {"__name__": "__main__"})


def test_every_link_between_the_pages_leads_somewhere() -> None:
    links = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
                links += 1
    assert links > 10


def test_nothing_of_the_makers_machine_is_in_the_repository() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        path = REPOSITORY / name
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".txt", "") and path.is_file():
            assert not re.search(r"/(root|work|home)/\w", path.read_text()), name
