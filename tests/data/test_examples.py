from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chats import TALK, read, section, written

from rostra.data.examples import Conversation, Segment, Text, Tokens
from rostra.data.sources import BadRecords
from rostra.errors import RequestError


def contents(folder: Path, kind: str, *records: Any, **keys: Any) -> list[Any]:
    source = {"type": kind, "path": written(folder, list(records), "records.json"), **keys}
    return [example.content for example in read(section(source))]


def test_alpaca(tmp_path: Path) -> None:
    plain, given = contents(
        tmp_path,
        "alpaca",
        {"instruction": "Sing.", "input": "", "output": "La\n"},
        {"instruction": "Add {}.", "input": "1, 2", "output": "3"},
    )
    prompt, answer = plain.segments
    assert answer == Segment("La\n", 1.0)
    assert prompt.weight is None
    assert prompt.text.endswith("request.\n\n### Instruction:\nSing.\n\n### Response:\n")
    assert given.segments[0].text.endswith(
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {}.\n\n### Input:\n1, 2\n\n### Response:\n"
    )


def test_mapping(tmp_path: Path) -> None:
    record = {"question": "Who?", "context": "I {did}.", "reply": "You"}
    keys: dict[str, Any] = {
        "field_instruction": "question",
        "field_input": "context",
        "field_output": "reply",
        "prompt": "<|user|>\n {input} {instruction} </s>\n<|assistant|>",
        "prompt_without_input": "<|user|> {instruction} {{}}",
        "system_prompt": "Be brief.",
        "system_format": "[{system}]",
    }
    both, alone, own = contents(
        tmp_path,
        "mapping",
        record,
        {**record, "context": None},
        {**record, "system": "Sing."},
        **keys,
    )
    prompt = "<|user|>\n I {did}. Who? </s>\n<|assistant|>"
    assert both.segments == (Segment("[Be brief.]" + prompt, None), Segment("You", 1.0))
    assert alone.segments[0].text == "[Be brief.]<|user|> Who? {}"
    assert own.segments[0].text == "[Sing.]" + prompt
    keys["prompt"] = "{system} says {instruction}{input}"  # then system_format is not used
    assert contents(tmp_path, "mapping", record, **keys)[0].segments[0].text == (
        "Be brief. says Who?I {did}."
    )
    for wrong in ("{instruction", "{answer}", "{instruction.x}"):
        with pytest.raises(RequestError, match=r"data.sources.0.prompt: .* is no prompt"):
            contents(tmp_path, "mapping", record, **{**keys, "prompt": wrong})


def test_squad_nested_and_flat(tmp_path: Path) -> None:
    question = {"id": "x", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 0}]}
    article = {"title": "T", "paragraphs": [{"context": "Ann did.", "qas": [question, question]}]}
    flat = {"context": "Ann did.", "question": "Who?", "answers": {"text": ["Ann", "she"]}}
    nested, again, single = contents(tmp_path, "squad", article, flat, system_prompt="Read.")
    prompt = "Read.\n\nContext:\nAnn did.\n\nQuestion:\nWho?\n\nAnswer:\n"
    assert nested == again == single == Text((Segment(prompt, None), Segment("Ann", 1.0)))
    source = {"type": "squad", "path": written(tmp_path, [article])}
    assert [e.id for e in read(section(source))] == [
        "squad:0:records.jsonl:1.1.1",
        "squad:0:records.jsonl:1.1.2",
    ]


def test_completion_and_segments_and_tokens(tmp_path: Path) -> None:
    assert contents(tmp_path, "completion", {"t": "So it goes."}, field="t") == [
        Text((Segment("So it goes.", 1.0),))
    ]
    segments = [{"text": "<s>a ", "label": False}, {"text": "b</s>", "label": True}]
    assert contents(tmp_path, "input_output", {"segments": segments}) == [
        Text((Segment("<s>a ", None), Segment("b</s>", 1.0)), special=True, bounded=False)
    ]
    tokens = {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100]}
    assert contents(
        tmp_path,
        "tokenized",
        {"input_ids": [5, 6]},
        {**tokens, "attention_mask": [1, 1, 1, 0]},
    ) == [Tokens((5, 6), (1.0, 1.0)), Tokens((5, 6, 7), (0.0, 1.0, 1.0))]


CALL = '{"name": "add", "arguments": {"a": 1}}'
SHAREGPT = {
    "system": "Be brief.",
    "tools": '[{"name": "add", "parameters": {}}]',
    "conversations": [
        {"from": "human", "value": "Add."},
        {"from": "function_call", "value": CALL},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "Two."},
    ],
}
OPENAI = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Ad"}, {"type": "text", "value": "d."}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ],
}


def test_dialects_of_conversations_agree(tmp_path: Path) -> None:
    other = {
        "talk": [
            {"who": {"human": "visitor"}.get(turn["from"], turn["from"]), "says": turn["value"]}
            for turn in SHAREGPT["conversations"]
        ],
        **{k: SHAREGPT[k] for k in ("tools", "system")},
    }
    first, second = contents(tmp_path, "chat", SHAREGPT, OPENAI)
    keys = {"messages": "talk", "role": "who", "content": "says", "roles": {"visitor": "user"}}
    assert first == second == contents(tmp_path, "chat", other, **keys)[0]
    assert isinstance(first, Conversation)
    assert [m.role for m in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [m.weight for m in first.messages] == [None, None, 1.0, None, 1.0]
    assert first.messages[2].more["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert first.tools == tuple(OPENAI["tools"])


def test_whose_turns_are_trained(tmp_path: Path) -> None:
    def weights(record: Any, **keys: Any) -> list[float | None]:
        return [m.weight for m in contents(tmp_path, "chat", record, **keys)[0].messages]

    talk = {"messages": TALK}
    assert weights(talk) == [None, None, 1.0, None, 1.0]
    assert weights(talk, train_turns="last") == [None, None, None, None, 1.0]
    assert weights(talk, train_roles=["user"]) == [None, 1.0, None, 1.0, None]
    extra: list[dict[str, Any]] = [{"loss_weight": 0.5}, {}, {"weight": 0}, {"train": True}, {}]
    said = {"messages": [{**turn, **more} for turn, more in zip(TALK, extra, strict=True)]}
    assert weights(said) == [0.5, None, 0.0, 1.0, 1.0]
    assert weights(said, train_turns="last", train_roles=["user"])[3:] == [1.0, None]
    assert weights(said, message_weight="train") == [None, None, 1.0, 1.0, 1.0]
    (ended,) = contents(tmp_path, "chat", said, message_weight="train", train_ends="last")
    assert ended.ends == "last"
    assert ended.messages[2].more == {"weight": 0}  # a key like any other, then


def test_preferences(tmp_path: Path) -> None:
    turns = TALK[1:2]
    good, bad = ({"role": "assistant", "content": text} for text in ("Four.", "Five."))
    pairs = [
        {"messages": turns, "chosen": good, "rejected": bad},
        {"prompt": TALK[1]["content"], "chosen": "Four.", "rejected": "Five."},
        {"chosen": [*turns, good], "rejected": [*turns, bad]},
    ]
    thumbs = [
        {"messages": [*turns, good], "label": True},
        {"prompt": turns, "completion": "Five.", "label": False},
    ]
    path = written(tmp_path, pairs + thumbs)
    found = read(section({"type": "preference", "path": path}))
    verdicts = [*["chosen", "rejected"] * 3, "up", "down"]
    assert [e.verdict for e in found] == verdicts
    assert [e.id.rsplit(":", 1)[1] for e in found] == verdicts
    for example in found:
        answer = "Four." if example.verdict in ("chosen", "up") else "Five."
        assert isinstance(example.content, Conversation)
        assert [(m.role, m.text, m.weight) for m in example.content.messages] == [
            ("user", "What is two and two?", None),
            ("assistant", answer, 1.0),
        ]


def _talk(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns], **more}


ASKED, ANSWERED = ("user", "Hi"), ("assistant", "Ho")
CALLED = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}


@pytest.mark.parametrize(
    "kind, record, message",
    [
        ("alpaca", {"instruction": "a"}, r"has no 'output' \(its keys: instruction\)"),
        ("alpaca", {"instruction": "a", "output": 5}, "holds a int, no text, under 'output'"),
        ("alpaca", {"instruction": "a", "output": " "}, "the answer under 'output' is empty"),
        ("completion", {"text": "\n"}, "the text under 'text' is empty"),
        ("squad", {"context": "a", "question": "b", "answers": []}, "has no answer"),
        ("squad", {"paragraphs": [{"qas": [3]}]}, "its paragraphs are not SQuAD's"),
        ("input_output", {"segments": [{"text": "a"}]}, "segment 1 has no `text` or no `label`"),
        ("tokenized", {"input_ids": [1, "2"]}, "no list of whole numbers under 'input_ids'"),
        (
            "tokenized",
            {"input_ids": [1, 2], "labels": [2, -100]},
            "label 0 is 2 where the token is",
        ),
        ("tokenized", {"input_ids": [1, 2], "labels": [1]}, "2 input_ids, 1 labels"),
        ("chat", {"text": "a"}, "no list of messages under 'conversations'"),
        ("chat", _talk(ASKED, ("assistant", "")), "message 2, the assistant's, is empty"),
        ("chat", _talk(ASKED, ASKED), "message 2 is of role user after user; assistant is"),
        ("chat", _talk(ANSWERED), "message 1 is of role assistant at the beginning"),
        ("chat", _talk(ASKED, ANSWERED, ASKED), "ends with a turn of the user"),
        ("chat", _talk(ASKED, ("tool", "x")), "message 2 is of role tool after user"),
        ("chat", _talk(ASKED, ("bot", "x")), "message 2 has the role 'bot'"),
        ("chat", _talk(("user", 5), ANSWERED), "message 1 has no text under 'content'"),
        ("chat", _talk(("user", [{"type": "image"}]), ANSWERED), "no text: 'image'"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "a"}, CALLED]},
            "`arguments` of message 2",
        ),
        ("chat", _talk(ASKED, ANSWERED, tools="[1]"), "`tools` is no list of objects"),
        (
            "chat",
            {"messages": [{**TALK[1], "loss_weight": -1}, TALK[2]]},
            "`loss_weight`: -1, which is no number of at least 0",
        ),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
        ("preference", {"prompt": "a", "chosen": "b"}, "has neither `chosen` and `rejected`"),
        ("preference", {"prompt": "a", "label": True}, "ends with no answer"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, kind: str, record: Any, message: str) -> None:
    good = {"instruction": "a", "output": "b", "text": "c"}
    before = [good] if kind in ("alpaca", "completion") else []
    path = written(tmp_path, [*before, record])
    data = section({"type": kind, "path": path})
    with pytest.raises(RequestError, match=f"records.jsonl, line {len(before) + 1}: .*{message}"):
        read(data)
    skipped = BadRecords("skip", lambda _: None)
    assert len(read(data, skipped)) == len(before)
    assert sum(skipped.counts.values()) == 1
