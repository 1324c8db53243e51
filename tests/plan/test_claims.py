"""Each command of the page on claims says what the page says that it does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rostra.cli import app
from rostra.errors import NoLayoutFits

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "claims.md"
SECTIONS = PAGE.read_text().split("\n## ")[1:]
COMMANDS = [
    (section, line.strip())
    for section in SECTIONS
    for line in section.splitlines()
    if line.startswith("    rostra plan ")
]


@pytest.mark.soak  # more than a minute
@pytest.mark.parametrize(("section", "command"), COMMANDS, ids=[c for _, c in COMMANDS])
def test_a_claim_is_answered_as_the_page_says(
    section: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], "--no-trace", "--json"])
    found = json.loads(done.stdout)
    if found["feasible"]:
        assert done.exit_code == 0, done.output
        memory = found["chosen"]["memory_bytes"]
        sizes = [memory["total"], *memory.values()]
        told = re.findall(r"\d+\.\d+", section)
        rounded = {f"{size / 1e9:.{digits}f}" for size in sizes for digits in (1, 2) if size}
        assert rounded & {*told}, rounded
    else:
        assert isinstance(done.exception, NoLayoutFits)
        assert re.search(r"fits|does not fit|Refused", section)
        if found["considered"] > 1:
            assert f"{found['considered']:,}" in section


def test_every_claim_has_its_command() -> None:
    claims = re.findall(r"^\| (?!claim)[^|]+\| (?!---)[^|]+\|$", PAGE.read_text(), re.MULTILINE)
    assert len(claims) == len(SECTIONS) == len({section for section, _ in COMMANDS})
