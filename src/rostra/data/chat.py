"""Chat templates: a conversation as text, and which parts of it are targets.

A template is rendered by transformers, in Jinja's sandbox. What part of the text is a turn's own
is found by rendering the conversation up to it and with it: each must be how the whole begins.
Templates that look ahead, so that a turn reads otherwise once more follow (thoughts that are
dropped from the past, tools that move to the last question), are asked for their own
`{% generation %}` blocks, else rendered with marks in the place of the messages' texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from rostra.data.conversations import Conversation, Message
from rostra.data.examples import Segment
from rostra.data.records import BadRecord
from rostra.data.templates import TEMPLATES
from rostra.data.turns import Span, TemplateFault, Turns, anchor, stand_in
from rostra.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What is meant to be one token wherever a template writes it.
MARKS = re.compile(
    r"<[|｜][\w▁-]+[|｜]>|\[\|\w+\|\]|\[/?[A-Z]{4}[A-Z_]*\]|</?s>|<(?:start|end)_of_turn>"
)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template: `name` for messages, Jinja `text`, and the names of special tokens."""

    name: str
    text: str
    special: dict[str, str]

    @classmethod
    def of(cls, name: str | None, tokenizer: PreTrainedTokenizerFast) -> ChatTemplate:
        """The template that `data.chat_template` names: a known one, a Jinja file, or None for
        the tokenizer's own.

        Raises:
            RequestError: when there is none, or it is not Jinja.
        """
        special = tokenizer.special_tokens_map
        if name is None:
            found = cls("of the tokenizer", _own(tokenizer), special)
        elif name in TEMPLATES:
            found = cls(name, TEMPLATES[name], special)
        else:
            found = cls(name, _file(name), special)
        found._compile()
        return found

    def _compile(self) -> None:
        try:
            self._render([], ())
        except TemplateFault as fault:
            if isinstance(fault.__cause__, TemplateSyntaxError):
                raise RequestError(
                    f"chat template {self.name}, line {fault.__cause__.lineno}: {fault}. "
                    "Correct it, or set data.chat_template to another."
                ) from fault

    def render(self, conversation: Conversation) -> str:
        """The conversation as text.

        Raises:
            BadRecord: when the template fails on it.
        """
        try:
            return self._render([m.values() for m in conversation.messages], conversation.tools)
        except TemplateFault as fault:
            line = f", line {fault.line}" if fault.line else ""
            problem = f"chat template {self.name}{line}: {fault}"
            raise BadRecord("template error", problem, "Correct the record or the template") from (
                fault
            )

    def segments(self, conversation: Conversation, inputs: float = 0.0) -> tuple[Segment, ...]:
        """The conversation as text in segments of one weight.

        A turn of the assistant begins after the generation prompt; of others, with its text.
        It ends with the end-of-turn mark: white space after that is no target.

        Args:
            inputs: the weight of what has none of its own.

        Raises:
            BadRecord: when the template fails, when it drops some of a message's text, or when
                the trained turns cannot be told apart.
        """
        whole = self.render(conversation)
        weights = [inputs if m.weight is None else m.weight for m in conversation.messages]
        wanted = [k for k, m in enumerate(conversation.messages) if m.weight is not None]
        wanted = [k for k in wanted if weights[k] or inputs]  # others are prompts like the rest
        _check_in_order(self.name, conversation.messages, whole)
        spans = self._spans(conversation, whole, wanted)
        segments, position = [], 0
        for k, (start, end) in zip(wanted, spans, strict=True):
            _check_turn(self.name, conversation.messages, k, whole[start:end])
            segments.append(Segment(whole[position:start], inputs))
            segments.append(Segment(whole[start:end], weights[k]))
            position = end
        segments.append(Segment(whole[position:], inputs))
        if conversation.ends == "all":
            segments = [part for one in segments for part in _with_ends(one, self.end_of_turn)]
        if conversation.ends == "last":
            segments = _but_last_end(segments, self.end_of_turn, inputs)
        return tuple(segment for segment in segments if segment.text)

    @cached_property
    def end_of_turn(self) -> str | None:
        """What the template writes after an answer, without white space; None where it writes
        nothing, or cannot be asked."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": stand_in(0)}]
        try:
            return self._render(talk, ()).partition(stand_in(0))[2].strip() or None
        except TemplateFault:
            return None

    def _spans(self, conversation: Conversation, whole: str, wanted: list[int]) -> list[Span]:
        """Where the wanted turns are in the whole."""

        def render(messages: list[dict[str, Any]], prompt: bool) -> str:
            return self._render(messages, conversation.tools, prompt)

        asks = "add_generation_prompt" in self.text
        turns = Turns(conversation.messages, whole, render, asks)
        spans = turns.by_prefixes(wanted)
        if spans is None and GENERATION.search(self.text):
            messages = [m.values() for m in conversation.messages]
            _, found = self._call(messages, conversation.tools, return_assistant_tokens_mask=True)
            spans = turns.by_blocks(wanted, found[0])
        spans = turns.by_marks(wanted) if spans is None else spans
        bounds = [bound for span in spans or [] for bound in span]
        if spans is None or bounds != sorted(bounds):
            problem = f"chat template {self.name}: where its turns begin and end cannot be told"
            advice = "Put {% generation %} blocks around them in the template"
            raise BadRecord("turns not found", problem, advice)
        return spans

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], prompt: bool = False
    ) -> str:
        """`messages` as text, followed by what asks for the assistant's turn if `prompt`."""
        texts, _ = self._call(messages, tools, add_generation_prompt=prompt)
        return texts[0]

    def _call(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], **options: bool
    ) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            return render_jinja_template(
                [messages],
                tools=list(tools) or None,
                chat_template=self.text,
                **options,
                **self.special,
            )
        except Exception as error:  # whatever the code of a template runs into
            raise TemplateFault(error) from error


def stop_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that end what a model writes: eos, and the end of a turn under the tokenizer's
    chat template, where that is a token of its own."""
    found = {tokenizer.eos_token_id} - {None}
    if isinstance(text := tokenizer.chat_template, str):
        end = ChatTemplate("of the tokenizer", text, tokenizer.special_tokens_map).end_of_turn
        ids = tokenizer(end or "", add_special_tokens=False).input_ids[:1]
        found |= {id for id in ids if id in tokenizer.added_tokens_decoder}
    return sorted(found)


def _with_ends(segment: Segment, end: str | None) -> list[Segment]:
    """A segment whose end-of-turn marks are targets, whatever the rest of it is."""
    if end is None or segment.weight:
        return [segment]
    parts = re.split(f"({re.escape(end)})", segment.text)
    return [Segment(part, 1.0 if part == end else segment.weight) for part in parts]


def _but_last_end(segments: list[Segment], end: str | None, inputs: float) -> list[Segment]:
    """Segments of which the trained ones, but the last, end without their mark as a target."""
    last = max((k for k, segment in enumerate(segments) if segment.weight), default=-1)
    found = []
    for k, segment in enumerate(segments):
        text, weight = segment.text, segment.weight
        if k == last or not weight or end is None or not text.endswith(end):
            found.append(segment)
        else:
            found += [Segment(text.removesuffix(end), weight), Segment(end, inputs)]
    return found


def _own(tokenizer: PreTrainedTokenizerFast) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise RequestError(
            "data.chat_template: the tokenizer has no chat template of its own. Name one "
            f"({', '.join(TEMPLATES)}) or a Jinja file."
        ) from error


def _file(name: str) -> str:
    try:
        return Path(name).expanduser().read_text("utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"data.chat_template: {name!r} is no known template ({', '.join(TEMPLATES)}) and no "
            f"file of one ({reason}). Correct it."
        ) from error


def _is_in(text: str, rendered: str, start: int = 0) -> int:
    """The end of `text` in `rendered`, as it is or as JSON writes it; -1 where it is not."""
    plain = text.strip()
    for form in (plain, json.dumps(plain, ensure_ascii=False)[1:-1]):
        if (place := rendered.find(form, start)) >= 0:
            return place + len(form)
    return -1


def _check_in_order(name: str, messages: tuple[Message, ...], whole: str) -> None:
    """Raises BadRecord unless the text of each message follows that of the one before it; a
    system's may stand anywhere."""
    position = 0
    for number, message in enumerate(messages, 1):
        system = message.role == "system"
        found = _is_in(anchor(message), whole, 0 if system else position)
        if found < 0:
            _drops(name, number, message, anchor(message))
        position = position if system else found


def _check_turn(name: str, messages: tuple[Message, ...], k: int, turn: str) -> None:
    """Raises BadRecord unless all that message `k` says is in its turn."""
    for text in (messages[k].text, *messages[k].calls):
        if _is_in(text, turn) < 0:
            _drops(name, k + 1, messages[k], text)


def _drops(name: str, number: int, message: Message, text: str) -> None:
    problem = (
        f"chat template {name} drops some of message {number} ({message.role}): "
        f"{text.strip()[:60]!r} is not in what it makes of it"
    )
    advice = "Take out what the template drops (thoughts go under `reasoning_content`)"
    raise BadRecord("text dropped", problem, advice)


def check_special_tokens(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate | None) -> None:
    """Raises RequestError when a special token, or a mark of the template, is several tokens.

    The tokenizer's own template may do so: then the model learned it that way.
    """
    backend = tokenizer.backend_tokenizer
    named = dict.fromkeys(tokenizer.all_special_tokens, "special token")
    if template is not None and template.text != tokenizer.chat_template:
        marks = MARKS.finditer(template.text)
        named |= {mark[0]: f"mark of chat template {template.name}" for mark in marks}
    for token, kind in named.items():
        ids = backend.encode(token, add_special_tokens=False).ids
        if len(ids) != 1:
            raise RequestError(
                f"data.tokenizer: the {kind} {token!r} is {len(ids)} tokens, not one. Add it "
                "under data.tokenizer.added, or choose the template that the model knows."
            )
