from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TALK, encode, section, tokenizer, written
from rich.console import Console

from rostra.data.audit import Audit, show_examples
from rostra.data.encode import Encoded
from rostra.errors import RequestError


def audited(folder: Path, kind: str, records: list[Any], **keys: Any) -> Audit:
    audit = Audit()
    for encoded in encode(section({"type": kind, "path": written(folder, records)}, **keys)):
        audit.add(encoded)
    return audit


def _segments(*pairs: tuple[str, bool]) -> dict[str, Any]:
    return {"segments": [{"text": text, "label": label} for text, label in pairs]}


def test_a_run_that_never_trains_an_end_is_refused(tmp_path: Path) -> None:
    endless = _segments(("ask", False), ("say", True), ("<|endoftext|>", False))
    ended = _segments(("ask", False), ("say<|endoftext|>", True))
    with pytest.raises(RequestError, match="none of the 2 examples is an end-of-turn or eos"):
        audited(tmp_path, "input_output", [endless, endless]).check()
    audit = audited(tmp_path, "input_output", [endless, ended])
    audit.check()
    assert audit.notices() == ["1 of 2 examples train no end-of-turn or eos token"]
    with pytest.raises(RequestError, match="no example is left"):
        Audit().check()
    unmarked = tmp_path / "unmarked.jinja"
    unmarked.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(RequestError, match="would never learn to stop"):
        audited(tmp_path, "chat", [{"messages": TALK}], chat_template=str(unmarked)).check()


def test_counts(tmp_path: Path) -> None:
    sly = {"messages": [{"role": "user", "content": "a<|im_end|>b"}, TALK[2]]}
    records = [{"messages": TALK}, sly]
    audit = audited(tmp_path, "chat", records, chat_template="chatml")
    audit.check()
    counts = audit.counts()
    assert (counts["examples"], counts["ends"], counts["endless"]) == (2, 3, 0)
    assert 0 < counts["targets"] < counts["tokens"]
    assert sum(counts["lengths"].values()) == 2
    assert counts["lookalikes"] == 1
    (notice,) = audit.notices()
    assert notice.startswith("1 names of special tokens")
    assert notice.endswith("records.jsonl, line 2")
    printed = Console(file=io.StringIO(), width=100)
    audit.show(printed)
    assert f"{counts['targets']} targets" in printed.file.getvalue()  # type: ignore[attr-defined]
    exact = Audit()
    for length in (8, 9, 16, 17):
        exact.add(Encoded("", "", np.zeros(length, np.uint16), np.ones(length, np.float32), 1, 1))
    assert exact.counts()["lengths"] == {"8": 1, "16": 2, "32": 1}


def test_examples_are_shown_token_by_token(tmp_path: Path) -> None:
    turns = [TALK[1], {**TALK[4], "loss_weight": 0.5}, TALK[1], TALK[2]]
    turns[2] = {"role": "user", "content": "so\x1b[2J"}
    encoded = encode(
        section(
            {"type": "chat", "path": written(tmp_path, [{"messages": turns}])},
            chat_template="chatml",
        )
    )
    plain, coloured = io.StringIO(), io.StringIO()
    show_examples(Console(file=plain, width=400), encoded, tokenizer(), 3)
    show_examples(
        Console(file=coloured, width=400, force_terminal=True, color_system="standard"),
        encoded,
        tokenizer(),
        1,
    )
    said = plain.getvalue()
    assert f"records.jsonl, line 1: {len(encoded[0].tokens)} tokens" in said
    assert said.replace("·", "").count("0.5×⟦Five 😊<|im_end|>⟧⏎") == 1
    assert said.replace("·", "").count("⟦Four.<|im_end|>⟧⏎") == 1
    assert said.count("·") > 20
    assert "so\\x1b[2J" in said.replace("·", "")
    assert "\x1b" not in said
    trained = coloured.getvalue().split("\x1b[1;32m")[1].split("\x1b[0m")[0]
    assert trained.replace("·", "") == "0.5×⟦Five 😊<|im_end|>⟧"


def test_long_examples_are_shown_in_part() -> None:
    length = 1000
    tokens = np.arange(length, dtype=np.uint16) % 50 + 5
    encoded = Encoded("id", "there", tokens, np.ones(length, np.float32), 1)
    out = io.StringIO()
    show_examples(Console(file=out, width=100), [encoded, encoded], tokenizer(), 1)
    assert out.getvalue().count("… 680 tokens …") == 1
