from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from chats import TALK, section, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from template_texts import DEFAULTS, END, NO_SYSTEM, ROLES, end_of, expected_text

from rostra.data.chat import ChatTemplate, stop_tokens
from rostra.data.conversations import Conversation, Message
from rostra.data.encode import ExampleEncoder
from rostra.data.records import BadRecord
from rostra.data.sources import BadRecords
from rostra.data.templates import TEMPLATES
from rostra.errors import RequestError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "é": "é"}}}
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)

# Looks ahead as Qwen3 does: thoughts, of which the last answer has empty ones, are dropped
# from the past, and so are answers to tools.
THINKING = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and (loop.last or m.reasoning_content and loop.index0 > 3) %}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content.split('</think>')[-1] }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + call.function.arguments | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# The same with its own blocks around what is generated, but without a prompt to ask for it.
BLOCKS = """
{%- for m in messages %}
    {{- m.role + ('!' if loop.last else '') + ': ' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m.content + eos_token + '\\n' }}{%- endgeneration %}
    {%- else %}
        {{- m.content + '\\n' }}
    {%- endif %}
{%- endfor %}
"""
# Tells the system's text, and the tools, before the last question only.
LATE = """
{%- set ns = namespace(left=messages | selectattr('role', 'equalto', 'user') | list | length) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.left = ns.left - 1 %}
        {{- '[INST] ' }}
        {{- messages[0].content + ' ' if not ns.left and messages[0].role == 'system' else '' }}
        {{- m.content + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def template(text: str) -> ChatTemplate:
    return ChatTemplate("test", text, {"eos_token": END, "bos_token": END})


def talk(*turns: tuple[str, str], weights: tuple[float | None, ...] = ()) -> Conversation:
    weights = weights or tuple(1.0 if role == "assistant" else None for role, _ in turns)
    return Conversation(
        tuple(Message(role, text, w) for (role, text), w in zip(turns, weights, strict=True))
    )


def trained(template: ChatTemplate, conversation: Conversation, inputs: float = 0.0) -> list[str]:
    segments = template.segments(conversation, inputs)
    assert "".join(s.text for s in segments) == template.render(conversation)
    return [s.text for s in segments if s.weight]


FOUR = talk(*((turn["role"], turn["content"]) for turn in TALK))


@pytest.mark.parametrize("name", TEMPLATES)
def test_named_templates_are_what_models_know(name: str) -> None:
    """Texts, what is trained of them, and what asks for an answer."""
    made, wanted = ChatTemplate.of(name, tokenizer()), expected_text(name)
    said = ("Be brief.", "Q", "A", "Q2", "A2")
    turns = [(role, f" {text}\n") for role, text in zip(ROLES, said, strict=True)]
    if name in NO_SYSTEM:
        with pytest.raises(BadRecord, match="no place for a system message"):
            made.render(talk(*turns))
        turns = turns[1:]
    assert made.render(talk(*turns)) == wanted.replace("«", "").replace("»", "")
    assert trained(made, talk(*turns)) == [part.partition("»")[0] for part in wanted.split("«")[1:]]
    assert made.end_of_turn == end_of(name)
    before = wanted.rpartition("«")[0].replace("«", "").replace("»", "")
    asked = made._render([m.values() for m in talk(*turns).messages[:-1]], (), True)
    assert asked == (before.rstrip(" ") if name in NO_SYSTEM else before)
    alone = made.render(talk(("user", "Q"), ("assistant", "A")))
    assert alone.startswith(DEFAULTS.get(name, "")) and ("Be" in alone) is False
    ids = ExampleEncoder(
        tokenizer(),
        section({"type": "chat", "path": ""}, chat_template=name),
        BadRecords("fail", print),
    )
    assert ids.template == made  # whose marks are tokens


WORDS = st.text("ab é.,\n<|", max_size=12).filter(str.strip)
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from([*TEMPLATES, "thinking", "blocks", "late"]),
    system=st.none() | WORDS,
    turns=TURNS,
    data=st.data(),
)
def test_targets_are_the_trained_turns(
    name: str, system: str | None, turns: list[tuple[str, str]], data: st.DataObject
) -> None:
    said = [("system", system)] if system and name not in NO_SYSTEM else []
    for asked, answered in turns:
        said += [("user", asked), ("assistant", answered)]
    weights = tuple(
        data.draw(st.sampled_from([None, 0.0, 0.5, 1.0])) if role == "assistant" else None
        for role, _ in said
    )
    own = {"thinking": THINKING, "blocks": BLOCKS, "late": LATE}
    made = template(own[name]) if name in own else ChatTemplate.of(name, tokenizer())
    end = "<|im_end|>" if name == "thinking" else END if name in own else end_of(name)
    expected = []
    for k, ((_, text), weight) in enumerate(zip(said, weights, strict=True)):
        if weight:
            said_so = text if name in ("thinking", "blocks") else text.strip()
            thinks = name in ("thinking", "qwen3") and k == len(said) - 1
            before = "<think>\n\n</think>\n\n" if thinks else " " * (name == "vicuna")
            expected.append((before + said_so + end, weight))
    found = made.segments(talk(*said, weights=weights))
    assert [(s.text, s.weight) for s in found if s.weight] == expected


def test_tool_calls_are_turns() -> None:
    turns = (
        Message("user", "Add."),
        Message("assistant", "", 1.0, {"tool_calls": [CALL]}),
        Message("tool", "2"),
        Message("assistant", "Two.", 1.0),
    )
    conversation = Conversation(turns, TOOLS)
    made = ChatTemplate.of("chatml", tokenizer())
    call = json.dumps(CALL["function"], ensure_ascii=False)
    assert trained(made, conversation) == [
        f"<tool_call>\n{call}\n</tool_call><|im_end|>",
        "Two.<|im_end|>",
    ]
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in made.render(conversation)
    last = "<think>\n\n</think>\n\nTwo.<|im_end|>"
    arguments = json.dumps(CALL["function"]["arguments"], ensure_ascii=False)
    assert trained(template(THINKING), conversation) == [
        f"<tool_call>add{arguments}<|im_end|>",
        last,
    ]
    with pytest.raises(BadRecord, match=r"template zephyr, line \d: this template has no form for"):
        ChatTemplate.of("zephyr", tokenizer()).render(conversation)


def test_inputs_and_other_roles_can_be_trained() -> None:
    made = ChatTemplate.of("chatml", tokenizer())
    weighted = talk(("user", "Hi"), ("assistant", "Ho"), weights=(0.5, None))
    assert [(s.text, s.weight) for s in made.segments(weighted) if s.weight] == [
        ("Hi<|im_end|>", 0.5)
    ]
    some = talk(("user", "Hi"), ("assistant", "Ho"), weights=(None, 0.0))
    assert "".join(trained(made, some, inputs=1.0)) == (
        f"{END}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\n"
    )
    both = talk(("user", "Hi"), ("assistant", "Ho"))
    assert trained(made, both, inputs=1.0)[1] == "Ho<|im_end|>"  # a segment, for its end


def test_which_ends_are_targets() -> None:
    made = ChatTemplate.of("chatml", tokenizer())
    end, turns = "<|im_end|>", FOUR.messages
    every = trained(made, Conversation(turns, ends="all"))
    assert every == [end, end, f"Four.{end}", end, f"Five 😊{end}"]
    assert trained(made, Conversation(turns, ends="last")) == ["Four.", f"Five 😊{end}"]
    first = (*turns[:4], Message("assistant", "Five 😊", 0.0))
    assert trained(made, Conversation(first, ends="last")) == [f"Four.{end}"]
    assert trained(made, Conversation(first, ends="all"))[-1] == end


def test_where_a_model_stops() -> None:
    own = copy.deepcopy(tokenizer())
    eos = own.eos_token_id
    assert stop_tokens(own) == [eos]
    own.chat_template = TEMPLATES["chatml"]
    assert stop_tokens(own) == sorted([eos, own.convert_tokens_to_ids("<|im_end|>")])
    own.chat_template = "{% for m in messages %}{{ m.content }}.{% endfor %}"
    assert stop_tokens(own) == [eos]  # a full stop is no mark
    own.chat_template = "{{ raise_exception('never') }}"
    assert stop_tokens(own) == [eos]


def test_what_cannot_be_told_apart_is_refused() -> None:
    backwards = "{% for m in messages | reverse %}{{ m.content }}|{% endfor %}"
    with pytest.raises(BadRecord, match="drops some of message 3"):
        template(backwards).segments(FOUR)
    counted = "{% for m in messages %}{{ messages | length, m.content | length }}"
    counted += "{{ m.content }}{% endfor %}"
    with pytest.raises(BadRecord, match="where its turns begin and end cannot be told"):
        template(counted).segments(FOUR)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{% for m in messages %}{{ m.content[:8] }};{% endfor %}", r"message 1 \(system\)"),
        ("{% for m in messages %}{{ m.content.split('F')[-1] }};{% endfor %}", "message 3"),
    ],
)
def test_dropped_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadRecord, match=f"chat template test drops some of {message}"):
        template(text).segments(FOUR)


def test_dropped_calls_are_refused() -> None:
    turns = (
        Message("user", "Add."),
        Message("assistant", "Let me see.", 1.0, {"tool_calls": [CALL]}),
        Message("tool", "2"),
        Message("assistant", "Two. I called add.", 1.0),
    )
    deaf = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    with pytest.raises(BadRecord, match=r"drops some of message 2 \(assistant\): 'add' is not in"):
        template(deaf).segments(Conversation(turns))


def test_errors_name_the_jinja_line(tmp_path: Path) -> None:
    failing = (
        "{% for m in messages %}\n{% if m.role == 'assistant' %}\n{{ raise_exception('no!') }}"
    )
    failing += "\n{% endif %}\n{% endfor %}"
    with pytest.raises(BadRecord, match="chat template test, line 3: no!"):
        template(failing).render(FOUR)
    sly = "\n{{ messages.__class__.__mro__ }}"
    with pytest.raises(BadRecord, match=r"line 2: .*unsafe"):
        template(sly).render(FOUR)
    path = tmp_path / "broken.jinja"
    path.write_text("{{ bos_token }}\n{% if %}")
    with pytest.raises(RequestError, match=r"broken.jinja, line 2: Expected an expression"):
        ChatTemplate.of(str(path), tokenizer())


def test_where_templates_come_from(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the tokenizer has no chat template.*chatml"):
        ChatTemplate.of(None, tokenizer())
    with pytest.raises(RequestError, match=r"'chatlm' is no known template \(alpaca, aya, chatml"):
        ChatTemplate.of("chatlm", tokenizer())
    (tmp_path / "own.jinja").write_text(BLOCKS, "utf-8")
    assert ChatTemplate.of(str(tmp_path / "own.jinja"), tokenizer()).text == BLOCKS
