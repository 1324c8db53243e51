"""Variants change prompts alone, the same ones each time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rostra.config.augmenting import AugmentTable
from rostra.config.sources import (
    AlpacaSource,
    ChatSource,
    CompletionSource,
    MappingSource,
    SquadSource,
)
from rostra.data.augment import Variant, varies
from rostra.data.conversations import Conversation, Message

ALPACA = AlpacaSource(type="alpaca", path="")
MAPPING = MappingSource(type="mapping", path="", field_instruction="ask", field_system="role")
SQUAD = SquadSource(type="squad", path="")
PROMPTS = ("Please: {instruction}", "{instruction} ({input})", "{{{instruction}}}")
RECORD = {"instruction": "Name two {rivers}.", "input": "of Asia", "output": "The Indus, the Ob."}
TALK = Conversation(
    (
        Message("user", "Which is longer?"),
        Message("assistant", "The Ob.", 1.0),
        Message("user", "Is it wide?"),
        Message("assistant", "It Is.", 0.5),
        Message("user", "Say I am a target.", 1.0),
        Message("assistant", "You are.", 1.0),
    )
)


def variant(number: int, id: str = "alpaca:0:1", seed: int = 0, **table: Any) -> Variant:
    return Variant(AugmentTable(variants=9, **{"casing": 0.5, **table}), number, id, seed)


def test_prompts_take_turns_and_input_moves_where_it_is_named() -> None:
    made = [variant(k, prompts=PROMPTS, casing=0).values(RECORD, ALPACA) for k in range(4)]
    assert made[0] is RECORD
    assert {(one["instruction"], one["input"]) for one in made[1:]} == {
        ("Please: Name two {rivers}.", "of Asia"),
        ("Name two {rivers}. (of Asia)", ""),
        ("{Name two {rivers}.}", "of Asia"),
    }
    assert all(one["output"] == RECORD["output"] for one in made)
    for record in ({**RECORD, "input": ""}, {"instruction": "Go.", "output": "x"}):
        worded = variant(1, prompts=PROMPTS[1:2], casing=0).values(record, ALPACA)
        assert worded == record  # no input for {input}


def test_keys_are_those_of_the_source() -> None:
    systems = ("Be brief.", "Be kind.")
    record = {"role": "Be.", "ask": "Who?", "input": "", "output": "Me.", "instruction": "no"}
    made = [variant(k, prompts=PROMPTS, systems=systems).values(record, MAPPING) for k in (1, 2)]
    assert {one["role"] for one in made} == set(systems)
    for one in made:
        assert one["ask"].lower() in ("please: who?", "{who?}")
        assert {**one, "role": "Be.", "ask": "Who?"} == record
    asked = {"question": "Who?", "context": "It was me.", "answers": ["me"]}
    found = variant(1, prompts=PROMPTS).values(asked, SQUAD)
    assert found["question"] != "Who?"
    assert {**found, "question": "Who?"} == asked
    for wrong in ({"instruction": 3}, {"instruction": "x", "input": ["y"]}, {}):
        assert variant(1, prompts=PROMPTS).values(wrong, ALPACA) is wrong
    completion = CompletionSource(type="completion", path="")
    assert variant(1).values(RECORD, completion) is RECORD
    assert varies(ALPACA) and varies(ChatSource(type="chat", path="")) and not varies(completion)


@given(st.integers(1, 8), st.integers(0, 99), st.text(max_size=5), st.booleans())
def test_conversations_keep_their_targets(number: int, seed: int, id: str, system: bool) -> None:
    talk = replace(TALK, messages=(Message("system", "Be."), *TALK.messages)) if system else TALK
    table = {"prompts": PROMPTS, "systems": ("Be brief.",), "casing": 1.0, "whitespace": 1.0}
    made = variant(number, id, seed, **table).conversation(talk)
    assert made == variant(number, id, seed, **table).conversation(talk)
    first, *turns = made.messages
    assert first == Message("system", "Be brief.")
    assert [m for m in turns if m.weight] == [m for m in TALK.messages if m.weight]
    question, again = turns[0].text, turns[2].text
    assert " ".join(question.lower().split()) in ("please: which is longer?", "{which is longer?}")
    assert again.lower() == "is  it  wide?"
    assert [m.role for m in turns] == [m.role for m in TALK.messages]
    assert variant(0, id, seed, **table).conversation(talk) is talk


def test_noise_is_of_the_share_asked_and_of_seed_id_and_number() -> None:
    talk = Conversation((Message("user", "wOrd " * 4000), Message("assistant", "No.", 1.0)))

    def noisy(**changed: Any) -> str:
        table = {"casing": 0.25, "whitespace": 0.1}
        return variant(**{"number": 1, **table, **changed}).conversation(talk).messages[0].text

    assert noisy().split().count("wOrd") / 4000 == pytest.approx(0.75, abs=0.03)
    assert noisy().count("  ") / 4000 == pytest.approx(0.1, abs=0.02)
    different = [noisy(), noisy(number=2), noisy(seed=1), noisy(id="alpaca:0:2")]
    assert len(set(different)) == 4
    target = Conversation((Message("system", "Be.", 1.0), *TALK.messages))
    assert variant(1, systems=("x",)).conversation(target).messages[0].text == "Be."


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"prompts": ["Do it"]}, "must name {instruction}"),
        ({"prompts": ["{instruction} {output}"]}, "must name {instruction}"),
        ({"prompts": ["{instruction.__class__}"]}, "must name {instruction}"),
        ({"prompts": ["{instruction!r}"]}, "must name {instruction}"),
        ({"prompts": ["{instruction"]}, "is no format"),
        ({"variants": 2}, "would all be the same"),
    ],
)
def test_a_table_that_means_nothing_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AugmentTable(**table)
    assert AugmentTable().variants == 1
