"""Records that cannot be tuned on: refused by file and number, or counted and listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import refused, rostra, tiny_run

TALK = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is said."}]
ODD = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- if 'odd' in m.content %}
    {{- raise_exception('I know no such word') }}
{%- endif %}
{%- endfor %}"""


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


# A record, the reason under which it is counted, and what is said of it.
BAD: list[tuple[Any, str, str]] = [
    ({"text": "no messages"}, "missing field", "has no list of messages under 'conversations'"),
    (
        talk(("user", "a"), ("user", "b"), ("assistant", "c")),
        "wrong role order",
        "message 2 is of role user after user; assistant is expected",
    ),
    (talk(("user", "a"), ("assistant", " \n")), "empty answer", "message 2, the assistant's, is"),
    (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', "encoding", "is not UTF-8"),
    (
        talk(("user", "odd"), ("assistant", "c")),
        "template error",
        "odd.jinja, line 4: I know no such word",
    ),
]


@pytest.mark.parametrize(("record", "reason", "said"), BAD, ids=[reason for _, reason, _ in BAD])
def test_a_bad_record_exits_with_2_or_is_counted(
    record: Any, reason: str, said: str, corpus: Path, tmp_path: Path
) -> None:
    lines = [json.dumps({"messages": TALK, "n": n}).encode() for n in range(20)]
    lines.insert(2, record if isinstance(record, bytes) else json.dumps(record).encode())
    (tmp_path / "records.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "odd.jinja").write_text(ODD)
    data = {
        "sources": [{"type": "chat", "path": str(tmp_path / "records.jsonl")}],
        "tokenizer": {"vocabulary": 300, "added": ["<|im_start|>", "<|im_end|>"]},
        "chat_template": str(tmp_path / "odd.jinja"),
        "sequence_length": 128,
        "cache": str(tmp_path / "cache"),
    }
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(tiny_run(corpus, tmp_path / "run", data=data)))
    refused(rostra("train", config), "records.jsonl, line 3: ", said)
    assert not (tmp_path / "run").exists()
    done = rostra("prepare", config, "--set", "data.on_bad_record=skip", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["skipped"] == {reason: 1}
    assert "records.jsonl, line 3" in done.stderr
    assert said in done.stderr
