"""Where each turn lies in a rendered conversation, found in three ways."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rostra.data.conversations import Message

Span = tuple[int, int]  # of characters


class TemplateFault(Exception):
    """A template failed on a conversation; `line` is its Jinja line."""

    def __init__(self, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
        self.line = lines[-1] if lines else None
        super().__init__(str(error) or repr(error))


@dataclass(frozen=True)
class Turns:
    """The turns of `messages` in `whole`, the text they are rendered to.

    `render(values, prompt)` renders messages, followed by what asks for the assistant's turn
    if `prompt` (and if the template `asks` for it at all). Each way gives a span for each
    wanted message, or None where it does not work.
    """

    messages: tuple[Message, ...]
    whole: str
    render: Callable[[list[dict[str, Any]], bool], str]
    asks: bool

    def by_prefixes(self, wanted: list[int]) -> list[Span] | None:
        """From the text before a turn and with it, as far as the whole begins like these."""
        spans = []
        for k in wanted:
            before = self._beginning(k, self._is_asked(k))
            after = self._beginning(k + 1, False)
            if before is None or after is None or not after.startswith(before):
                return None
            start = len(before)
            if not self._is_asked(k):  # what the template puts before its text is not its own
                start = max(start, after.find(self.messages[k].text.strip(), start))
            spans.append(_trimmed(start, after))
        return spans

    def _is_asked(self, k: int) -> bool:
        """Whether the turn follows a generation prompt."""
        return self.asks and k > 0 and self.messages[k].role == "assistant"

    def _beginning(self, count: int, prompt: bool) -> str | None:
        """The first `count` messages rendered, if the whole begins so."""
        if count in (0, len(self.messages)):  # of no message, templates seldom make sense
            return self.whole if count else ""
        try:
            text = self.render([m.values() for m in self.messages[:count]], prompt)
        except TemplateFault:
            return None
        return text if self.whole.startswith(text) else None

    def by_blocks(self, wanted: list[int], blocks: list[Span]) -> list[Span] | None:
        """From the template's `{% generation %}` blocks, one for each turn of the assistant."""
        spoken = [k for k, m in enumerate(self.messages) if m.role == "assistant"]
        if len(blocks) != len(spoken) or not set(wanted) <= set(spoken):
            return None
        spans = dict(zip(spoken, blocks, strict=True))
        return [_trimmed(spans[k][0], self.whole[: spans[k][1]]) for k in wanted]

    def by_marks(self, wanted: list[int]) -> list[Span] | None:
        """From the text with marks in the place of the messages' texts."""
        try:
            spans = [self._marked_span(k) for k in wanted]
        except TemplateFault:
            return None
        found = [span for span in spans if span is not None]
        return found if len(found) == len(wanted) else None

    @cached_property
    def _skeleton(self) -> tuple[list[int], list[str], list[str]] | None:
        """Messages in the order in which they are rendered, the template's own text before each
        and after the last, and what they say there; None unless these make the whole."""
        count = len(self.messages)
        skeleton = self.render(self._marked, False)
        order = sorted(range(count), key=lambda k: skeleton.find(stand_in(k)))
        pieces = re.split("|".join(map(stand_in, range(count))), skeleton)
        if len(pieces) != count + 1 or any(stand_in(k) not in skeleton for k in order):
            return None
        texts, position = [], 0
        for k, piece, following in zip(order, pieces, pieces[1:], strict=False):
            position += len(piece)
            raw = anchor(self.messages[k])
            forms = (raw, raw.strip(), raw.lstrip(), raw.rstrip())
            made = (form for form in forms if self.whole.startswith(form + following, position))
            texts.append(next(made, ""))
            position += len(texts[-1])
        made_of = "".join(a + b for a, b in zip(pieces, [*texts, ""], strict=True))
        return (order, pieces, texts) if made_of == self.whole else None

    def _marked_span(self, k: int) -> Span | None:
        """The span of turn `k`; its end mark is what follows it when it is the last turn."""
        if self._skeleton is None:
            return None
        order, pieces, texts = self._skeleton
        rank = order.index(k)
        start = sum(map(len, pieces[: rank + 1])) + sum(map(len, texts[:rank]))
        alone = self.render(self._marked[: k + 1], False)
        tail = alone.partition(stand_in(k))[2].rstrip()
        if not pieces[rank + 1].startswith(tail):
            return None
        end = start + len(texts[rank]) + len(tail)
        if self._is_asked(k):
            plain = self.render(self._marked[:k], False)
            prompt = self.render(self._marked[:k], True).removeprefix(plain)
            place = pieces[rank].rfind(prompt)
            if prompt and place >= 0:
                start -= len(pieces[rank]) - place - len(prompt)
        return start, end

    @cached_property
    def _marked(self) -> list[dict[str, Any]]:
        """The messages with a mark each in the place of its anchor."""
        found = []
        for k, message in enumerate(self.messages):
            values = message.values()
            if message.text.strip() or not message.calls:
                values["content"] = stand_in(k)
            else:
                first, *more = message.more["tool_calls"]
                named = {**first, "function": {**first["function"], "name": stand_in(k)}}
                values["tool_calls"] = [named, *more]
            found.append(values)
        return found


def anchor(message: Message) -> str:
    """What of a message is looked for in its turn: its text, or the name of what it calls."""
    return message.text if message.text.strip() or not message.calls else message.calls[0]


def stand_in(k: int) -> str:
    """What stands in the place of what message `k` says."""
    return f"Zq{k}ROSTRAq"


def _trimmed(start: int, text: str) -> Span:
    """From `start` to the end of `text` without the white space there."""
    return start, max(start, len(text.rstrip()))
