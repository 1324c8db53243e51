from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TALK, encode, section, targets, tokenizer, written
from hypothesis import given, settings
from hypothesis import strategies as st
from template_texts import end_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rostra.config.data import TokenizerTable
from rostra.data.conversations import Conversation, Message
from rostra.data.encode import ExampleEncoder
from rostra.data.examples import Example, Segment, Text, Tokens
from rostra.data.sources import BadRecords
from rostra.data.templates import TEMPLATES
from rostra.data.tokenizer import add_tokens, train_tokenizer
from rostra.errors import RequestError

END = "<|endoftext|>"
FAIL = BadRecords("fail", print)


def spoken(record: dict[str, Any]) -> str:
    """The answers of a conversation as chatml has them."""
    said = []
    for turn in record.get("messages") or record["conversations"]:
        role, text = turn.get("role") or turn["from"], turn.get("content") or turn["value"]
        text = text if isinstance(text, str) else "".join(part["value"] for part in text)
        if role == "function_call":
            text = json.dumps(json.loads(text), ensure_ascii=False)
            said.append(f"<tool_call>\n{text}\n</tool_call><|im_end|>")
        elif role in ("gpt", "assistant"):
            said.append(text.strip() + "<|im_end|>")
    return "".join(said)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("alpaca", "alpaca_en_demo.json"),
        ("chat", "glaive_toolcall_en_demo.json"),
        ("chat", "v1_sft_demo.jsonl"),
        ("preference", "dpo_en_demo.json"),
        ("preference", "kto_en_demo.json"),
    ],
)
def test_targets_of_real_records_are_their_answers(
    shared_data: Path, tmp_path: Path, kind: str, name: str
) -> None:
    raw = (shared_data / "sft" / name).read_text()
    records = [json.loads(line) for line in raw.split("\n") if line] if name[-1] == "l" else None
    records = (records or json.loads(raw))[:60]
    path = written(tmp_path, records, name)
    found = encode(section({"type": kind, "path": path}, chat_template="chatml"))
    if kind == "alpaca":
        expected = [record["output"] + END for record in records]
    elif name.startswith("dpo"):
        pairs = ((record["chosen"], record["rejected"]) for record in records)
        expected = [answer["value"].strip() + "<|im_end|>" for pair in pairs for answer in pair]
    elif name.startswith("kto"):
        last = ({"messages": record["messages"][-1:]} for record in records)
        expected = [spoken(record) for record in last]
    else:
        expected = [spoken(record) for record in records]
    assert [targets(example) for example in found] == expected
    assert all(example.ends and not example.weights[0] for example in found)


WORDS = st.text("ab é😊.,\n<|", max_size=12).filter(str.strip)
WEIGHTS = st.sampled_from([None, 0.0, 0.5, 1.0])


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    turns=st.lists(st.tuples(WORDS, WORDS, WEIGHTS), min_size=1, max_size=3),
)
def test_decoded_targets_are_the_trained_turns(
    name: str, turns: list[tuple[str, str, float | None]]
) -> None:
    messages = [
        message
        for asked, answered, weight in turns
        for message in (Message("user", asked), Message("assistant", answered, weight))
    ]
    encoder = _encoder(chat_template=name)
    example = Example("id", "where", Conversation(tuple(messages)))
    before = [" " * (name == "vicuna")] * len(turns)
    if name == "qwen3":
        before[-1] = "<think>\n\n</think>\n\n"
    said = [lead + t.strip() + end_of(name) for lead, (_, t, _) in zip(before, turns, strict=True)]
    for weight in (0.5, 1.0):
        expected = "".join(s for s, (*_, w) in zip(said, turns, strict=True) if w == weight)
        found = encoder.encode([example])
        assert (targets(found[0], lambda w: w == weight) if found else "") == expected  # noqa: B023


def _encoder(**keys: Any) -> ExampleEncoder:
    """An encoder of conversations; what has no target is passed over."""
    data = section({"type": "chat", "path": "x"}, **keys)
    return ExampleEncoder(tokenizer(), data, BadRecords("skip", lambda _: None))


def _one(content: Any, **keys: Any) -> Any:
    keys.setdefault("chat_template", "chatml")
    (found,) = _encoder(**keys).encode([Example("id", "where", content)])
    return found


def test_ends_are_added_once() -> None:
    eos = tokenizer().eos_token_id
    plain = (Segment("ask ", None), Segment("say", 1.0))
    written_out = (Segment(f"{END}ask ", None), Segment(f"say{END}", 1.0))
    added = _one(Text(plain))
    given_ends = _one(Text(written_out, special=True))
    exact = _one(Text(written_out, special=True, bounded=False))
    for found in (added, given_ends, exact):
        assert found.tokens.tolist() == added.tokens.tolist()
        assert found.weights.tolist() == added.weights.tolist()
        assert (found.ends, targets(found).strip()) == (1, f"say{END}")
    assert (added.tokens == eos).nonzero()[0].tolist() == [0, len(added.tokens) - 1]
    assert _one(Text(plain, bounded=False)).ends == 0
    talk = Conversation((Message("user", "a"), Message("assistant", "b", 1.0)))
    for name in ("chatml", "zephyr"):  # which write bos themselves
        assert _one(talk, chat_template=name).tokens[:2].tolist().count(eos) == 1
    both = Text((Segment("ask", 1.0), Segment(f"{END}", 1.0)), special=True, bounded=False)
    assert _one(both).ends == 1


def test_names_of_special_tokens_in_texts() -> None:
    eos, mark = tokenizer().eos_token_id, tokenizer().convert_tokens_to_ids("<|im_end|>")
    said = f"a {END} <|im_end|> b"
    plain = _one(Text((Segment(said, 1.0),)))
    assert not {eos, mark} & set(plain.tokens[1:-1].tolist())  # only text
    assert plain.lookalikes == 0
    meant = _one(Text((Segment(said, 1.0),), special=True, written=(said,)))
    assert {eos, mark} <= set(meant.tokens[1:-1].tolist())
    assert meant.lookalikes == 2
    talk = Conversation((Message("user", said), Message("assistant", "b", 1.0)))
    assert _one(talk).lookalikes == 2


def test_inputs_are_targets_where_asked() -> None:
    text = Text((Segment("ask ", None), Segment("say", 0.5)))
    assert targets(_one(text, train_on_inputs=True)) == f"ask say{END}"
    assert set(_one(text).weights.tolist()) == {0.0, 0.5}
    talk = Conversation((Message("user", "a"), Message("assistant", "b", 1.0)))
    found = _one(talk, train_on_inputs=True)
    assert found.weights.tolist() == [0.0] + [1.0] * (len(found.tokens) - 1)
    assert found.ends == 1


def test_pieces_that_begin_with_a_space(tmp_path: Path) -> None:
    """A tokenizer as sentencepiece makes them: words take the space before them along."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], vocab_size=200)
    backend.train_from_iterator(["ask me and say so " * 9], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    record = {"instruction": "ask me", "output": "say so"}
    data = section({"type": "mapping", "path": written(tmp_path, [record])})
    text = Text((Segment("ask me ", None), Segment("say so", 1.0)))
    (found,) = ExampleEncoder(made, data, FAIL).encode([Example("id", "where", text)])
    whole = backend.encode("ask me say so", add_special_tokens=False).ids
    assert found.tokens.tolist() == [0, *whole, 1]
    pairs = zip(made.convert_ids_to_tokens(found.tokens), found.weights, strict=True)
    assert "".join(token for token, weight in pairs if weight) == "▁say▁so</s>"


def test_offsets_are_those_of_all_characters() -> None:
    """GPT-2's post-processor gives spaces none, so that it would have another's weight."""
    backend = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    encoder = ExampleEncoder(made, section({"type": "completion", "path": "x"}), FAIL)
    text = Text((Segment("a", None), Segment("  ", 1.0), Segment("b", None)), bounded=False)
    (found,) = encoder.encode([Example("id", "where", text)])
    assert targets(found) == "  "


def test_tokens_are_checked() -> None:
    found = _one(Tokens((5, 6, 0), (1.0, 1.0, 1.0)))
    assert (found.tokens.tolist(), found.weights.tolist(), found.ends) == ([5, 6, 0], [0, 1, 1], 1)
    data = section({"type": "tokenized", "path": "x"})
    encoder = ExampleEncoder(tokenizer(), data, FAIL)
    with pytest.raises(RequestError, match=r"here: holds token 9999; the vocabulary has 0 to \d+"):
        encoder.encode([Example("id", "here", Tokens((5, 9999), (1.0, 1.0)))])


def test_what_has_no_target_is_rejected(tmp_path: Path) -> None:
    records = [{"messages": TALK}, {"messages": [{**turn, "loss_weight": 0} for turn in TALK]}]
    data = section({"type": "chat", "path": written(tmp_path, records)}, chat_template="llama3")
    with pytest.raises(RequestError, match=r"jsonl, line 2: has no token to train on"):
        encode(data)
    skipped = BadRecords("skip", lambda _: None)
    assert [e.id for e in encode(data, skipped)] == ["chat:0:records.jsonl:1"]
    assert skipped.counts == {"no target": 1}


def test_the_hash_tells_what_decides_tokens_and_weights() -> None:
    def made(template: str = "chatml", inputs: bool = False, end: str | None = None) -> str:
        own = train_tokenizer(iter(["some text"]), 260)
        added = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>")
        special = {"eos_token": end} if end else {}
        add_tokens(own, TokenizerTable(added=(*added, "<|end_header_id|>"), special=special))
        source = {"type": "chat", "path": "x"}
        data = section(source, chat_template=template, train_on_inputs=inputs)
        return ExampleEncoder(own, data, FAIL).hash

    hashes = [made(), made("llama3"), made(inputs=True), made(end="<|im_end|>")]
    assert len(set(hashes)) == 4
    assert made() == hashes[0]


def test_special_tokens_that_split_are_refused() -> None:
    bare = train_tokenizer(iter(["some text"]), 260)
    data = section({"type": "chat", "path": "x"}, chat_template="chatml")
    with pytest.raises(
        RequestError, match=r"mark of chat template chatml '<\|im_\w+\|>' is \d+ tok"
    ):
        ExampleEncoder(bare, data, FAIL)
    bare.chat_template = TEMPLATES["chatml"]  # a model that learned it so
    ExampleEncoder(bare, data, FAIL)
    bare.pad_token = "<|pad|>"
    with pytest.raises(RequestError, match=r"special token '<\|pad\|>' is \d+ tokens, not one"):
        ExampleEncoder(bare, data, FAIL)


def test_tokens_are_added_the_same_way() -> None:
    table = {"pad_token": "<pad>", "eos_token": "<end>"}
    ids = []
    for special in (table, dict(reversed(table.items()))):
        made = train_tokenizer(iter(["some text"]), 260)
        before = len(made)
        added = TokenizerTable.model_validate({"special": special, "added": ["gene X", "<end>"]})
        assert add_tokens(made, added) == 3
        assert (made.eos_token, made.pad_token) == ("<end>", "<pad>")
        assert made.encode("a gene X b").count(before + 2) == 1
        ids.append(made.get_vocab())
        assert add_tokens(made, added) == 0  # all there already
    assert ids[0] == ids[1]
    assert [ids[0][token] for token in ("<end>", "<pad>", "gene X")] == list(
        range(before, before + 3)
    )
    assert np.all(np.diff(sorted(ids[0].values())) == 1)
