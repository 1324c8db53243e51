"""Examples to tune on: what each format of records becomes."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rostra.config.augmenting import AugmentTable
from rostra.config.sources import (
    AlpacaSource,
    ChatSource,
    CompletionSource,
    ExampleSource,
    InputOutputSource,
    MappingSource,
    PreferenceSource,
    SquadSource,
    TokenizedSource,
)
from rostra.data.augment import Variant, varies
from rostra.data.conversations import Conversation, Message, conversation, preferences
from rostra.data.records import BadRecord, Record, find_records, read_records
from rostra.data.sources import BadRecords, Part
from rostra.errors import RequestError

__all__ = ["Conversation", "Example", "ExampleReader", "Message", "Segment", "Text", "Tokens"]

# The prompts of Stanford Alpaca (Taori et al. 2023), which models tuned on it know.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
SQUAD = "Context:\n{context}\n\nQuestion:\n{question}\n\nAnswer:\n"
NO_LABEL = -100


@dataclass(frozen=True)
class Segment:
    """Text of one loss weight; None where it is a prompt (see `Message.weight`)."""

    text: str
    weight: float | None


@dataclass(frozen=True)
class Text:
    """Text in segments, which are tokenized as one.

    Attributes:
        special: names of special tokens in it are special tokens; else they are only text.
        bounded: it is given the tokenizer's bos, and its eos as a target.
        written: the record's own texts in it, where a special token's name is suspect.
    """

    segments: tuple[Segment, ...]
    special: bool = False
    bounded: bool = True
    written: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tokens:
    """Tokens as they are, and the loss weight of each as a target."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


Content = Text | Conversation | Tokens


@dataclass(frozen=True)
class Example:
    """What is tuned on.

    Attributes:
        id: source, file and number; one of its own.
        where: file and record number, for messages.
        verdict: of preference data: chosen, rejected, up or down; such are not trained on.
        variants: the same example with its prompt varied, where that is asked for.
    """

    id: str
    where: str
    content: Content
    verdict: str | None = None
    variants: tuple[Content, ...] = ()


@dataclass(frozen=True)
class ExampleReader:
    """Reads one source of examples; `index` is its place in `data.sources`."""

    index: int
    source: ExampleSource
    augment: AugmentTable = field(default_factory=AugmentTable)

    @property
    def name(self) -> str:
        return self.source.name or f"{self.source.type}:{self.index}"

    @property
    def key(self) -> str:
        """The source's place in the config, for messages."""
        return f"data.sources.{self.index}"

    @property
    def variants(self) -> int:
        """How many there are of each example, itself among them."""
        return self.augment.variants if varies(self.source) else 1

    def parts(self, bad: BadRecords) -> list[Part]:
        """The files of the source in their fixed order."""
        return find_records(self.source, self.key, bad)

    def examples(self, part: Part, bad: BadRecords) -> Iterator[Example]:
        """The examples of a file; records that cannot be used go to `bad`.

        Raises:
            RequestError: for a prompt in the config that is none; under `bad`.
        """
        for record in self._records(part, bad):
            try:
                found = list(self._contents(record.values))
                variants = tuple(self._variant(record, k) for k in range(1, self.variants))
            except BadRecord as problem:
                problem.reject(record.where, bad)
                continue
            for content, verdict in found:
                id = f"{self.name}:{record.id}" + (f":{verdict}" if verdict else "")
                yield Example(id, record.where, content, verdict, variants)

    def _records(self, part: Part, bad: BadRecords) -> Iterator[Record]:
        for record in read_records(part, self.source, self.key, bad):
            if isinstance(self.source, SquadSource) and "paragraphs" in record.values:
                try:
                    yield from _questions(record)
                except BadRecord as problem:
                    problem.reject(record.where, bad)
            else:
                yield record

    def _variant(self, record: Record, number: int) -> Content:
        variant = Variant(self.augment, number, f"{self.name}:{record.id}", self.augment.seed)
        values = variant.values(record.values, self.source)
        ((content, _),) = self._contents(values)  # of what has prompts, a record is an example
        return variant.conversation(content) if isinstance(content, Conversation) else content

    def _contents(self, values: dict[str, Any]) -> Iterator[tuple[Content, str | None]]:
        """What a record holds, each with its verdict, if it has one."""
        match self.source:
            case PreferenceSource():
                yield from ((talk, verdict) for verdict, talk in preferences(values))
            case ChatSource():
                yield conversation(values, self.source), None
            case AlpacaSource():
                yield _alpaca(values), None
            case CompletionSource(field=name):
                yield Text((Segment(_text(values, name), 1.0),)), None
            case InputOutputSource():
                yield _input_output(values), None
            case SquadSource():
                yield _squad(values, self.source.system_prompt), None
            case MappingSource():
                yield _mapping(values, self.source, self.key), None
            case TokenizedSource():
                yield _tokenized(values), None


def _text(values: dict[str, Any], name: str, needed: bool = True) -> str:
    """The text under `name`, which must be there and not blank if it is `needed`."""
    text = values.get(name)
    if text is None and not needed:
        return ""
    if not isinstance(text, str):
        kind = "has no" if text is None else f"holds a {type(text).__name__}, no text, under"
        problem = f"{kind} {name!r} (its keys: {', '.join(values) or 'none'})"
        reason = "missing field" if text is None else "wrong type"
        raise BadRecord(reason, problem, "Correct the record, or name the key in the source")
    if needed and not text.strip():
        raise BadRecord("empty", f"the text under {name!r} is empty", "Remove the record")
    return text


def _answer(values: dict[str, Any], name: str) -> Segment:
    if isinstance(values.get(name), str) and not values[name].strip():
        problem = f"the answer under {name!r} is empty"
        raise BadRecord("empty answer", problem, "Remove the record")
    return Segment(_text(values, name), 1.0)


def _alpaca(values: dict[str, Any]) -> Text:
    instruction, given = _text(values, "instruction"), _text(values, "input", needed=False)
    prompt = ALPACA_INPUT if given.strip() else ALPACA
    filled = prompt.format(instruction=instruction, input=given)
    return Text((Segment(filled, None), _answer(values, "output")))


def _input_output(values: dict[str, Any]) -> Text:
    """Exactly the texts given; names of special tokens in them are meant."""
    segments = values.get("segments")
    if not isinstance(segments, list) or not segments:
        raise BadRecord("missing field", "has no list of `segments`", "Correct the record")
    found = []
    for number, segment in enumerate(segments, 1):
        if (
            not isinstance(segment, dict)
            or not isinstance(segment.get("text"), str)
            or not isinstance(segment.get("label"), bool)
        ):
            problem = f"segment {number} has no `text` or no `label` that is true or false"
            raise BadRecord("wrong type", problem, "Correct the record")
        found.append(Segment(segment["text"], 1.0 if segment["label"] else None))
    return Text(tuple(found), special=True, bounded=False)


def _questions(article: Record) -> Iterator[Record]:
    """The questions of an article of SQuAD's nested JSON as flat records."""
    try:
        for p, paragraph in enumerate(article.values["paragraphs"], 1):
            for q, question in enumerate(paragraph["qas"], 1):
                flat = {**question, "context": paragraph["context"]}
                where = f"{article.where}, paragraph {p}, question {q}"
                yield Record(where, f"{article.id}.{p}.{q}", flat)
    except (TypeError, KeyError, AttributeError) as error:
        problem = f"its paragraphs are not SQuAD's ({error!r})"
        raise BadRecord("wrong type", problem, "Correct the record") from error


def _squad(values: dict[str, Any], system: str) -> Text:
    """The first answer is the target: the others are for judging, not for learning."""
    context, question = _text(values, "context"), _text(values, "question")
    answers = values.get("answers")
    if isinstance(answers, dict):  # flat records have columns, {"text": [...]}
        texts = answers.get("text")
    else:
        rows = answers if isinstance(answers, list) else []
        texts = [row.get("text") if isinstance(row, dict) else row for row in rows]
    first = texts[0] if isinstance(texts, list) and texts else texts
    if not isinstance(first, str) or not first.strip():
        raise BadRecord("empty answer", "the question has no answer", "Remove the record")
    prompt = (f"{system}\n\n" if system else "") + SQUAD.format(context=context, question=question)
    return Text((Segment(prompt, None), Segment(first, 1.0)))


def _mapping(values: dict[str, Any], source: MappingSource, key: str) -> Text:
    """A prompt of the config's making; names of special tokens in it are meant."""
    texts = {
        "system": _text(values, source.field_system, needed=False) or source.system_prompt,
        "instruction": _text(values, source.field_instruction),
        "input": _text(values, source.field_input, needed=False),
    }
    name = "prompt" if texts["input"].strip() else "prompt_without_input"
    template: str = getattr(source, name)
    prompt, named = _fill(template, texts, f"{key}.{name}")
    if texts["system"] and "system" not in named:
        prompt = _fill(source.system_format, texts, f"{key}.system_format")[0] + prompt
    answer = _answer(values, source.field_output)
    written = (*texts.values(), answer.text)
    return Text((Segment(prompt, None), answer), special=True, written=written)


def _fill(template: str, texts: dict[str, str], key: str) -> tuple[str, set[str]]:
    """The template with its names replaced (`{{` and `}}` are braces), and these names.

    Raises:
        RequestError: for other names, or braces without a pair.
    """
    pieces, names = [], set()
    try:
        for literal, name, _, _ in string.Formatter().parse(template):
            pieces.append(literal)
            if name is not None:
                pieces.append(texts[name])
                names.add(name)
    except (ValueError, KeyError) as error:
        raise RequestError(
            f"{key}: {template!r} is no prompt ({error}). It may name {{system}}, "
            "{instruction} and {input}; write {{ and }} for braces."
        ) from error
    return "".join(pieces), names


def _tokenized(values: dict[str, Any]) -> Tokens:
    """Tokens without padding; labels are the tokens themselves, not the next ones. Or `tokens`
    and `weights`, as Rostra writes them."""
    if "weights" in values:
        return _weighted(values)
    ids = _integers(values, "input_ids")
    labels = _integers(values, "labels") if "labels" in values else ids
    mask = _integers(values, "attention_mask") if "attention_mask" in values else [1] * len(ids)
    if not len(ids) == len(labels) == len(mask):
        problem = f"{len(ids)} input_ids, {len(labels)} labels, {len(mask)} of attention_mask"
        raise BadRecord("wrong type", problem, "Correct the record")
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, NO_LABEL):
            problem = f"label {place} is {label} where the token is {token}"
            advice = "Labels are the tokens themselves, not moved on, or -100; correct the record"
            raise BadRecord("wrong labels", problem, advice)
    kept = [k for k, inside in enumerate(mask) if inside]
    weights = (float(labels[k] != NO_LABEL) for k in kept)
    return Tokens(tuple(ids[k] for k in kept), tuple(weights))


def _weighted(values: dict[str, Any]) -> Tokens:
    ids, weights = _integers(values, "tokens"), values["weights"]
    listed = isinstance(weights, list) and all(map(_is_weight, weights))
    if not listed or len(weights) != len(ids):
        problem = "has no weight of at least 0 for each of its tokens"
        raise BadRecord("wrong type", problem, "Correct the record")
    return Tokens(tuple(ids), tuple(map(float, weights)))


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _integers(values: dict[str, Any], name: str) -> list[int]:
    found = values.get(name)
    if not isinstance(found, list) or not found or not all(type(n) is int for n in found):
        reason = "missing field" if found is None else "wrong type"
        problem = f"has no list of whole numbers under {name!r}"
        raise BadRecord(reason, problem, "Correct the record")
    return found
