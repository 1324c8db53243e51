"""Conversations of records: messages of several dialects as one value, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from rostra.config.sources import ChatSource
from rostra.data.records import BadRecord

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# Who may speak after whom; a turn of the assistant that calls tools wants their answers.
FOLLOWERS = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("tool",),
    "tool": ("tool", "assistant"),
}
WEIGHTS = ("loss_weight", "weight", "train")


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: system, user, assistant or tool.
        text: its content.
        weight: loss weight of its tokens as targets; None where it is a prompt, which counts
            0, or 1 under `data.train_on_inputs`.
        more: what templates take beside these: tool_calls, name, reasoning_content, ...
    """

    role: str
    text: str
    weight: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> tuple[str, ...]:
        """The names of the functions that are called."""
        return tuple(call["function"]["name"] for call in self.more.get("tool_calls", ()))

    def values(self) -> dict[str, Any]:
        """As templates of transformers take it."""
        return {"role": self.role, "content": self.text, **self.more}


@dataclass(frozen=True)
class Conversation:
    """Turns in their order, and the tools (JSON schemas) that the assistant may call. `ends` says
    which marks of a turn's end are targets: see `data.sources.train_ends`."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    ends: Literal["turn", "all", "last"] = "turn"


def conversation(values: dict[str, Any], source: ChatSource) -> Conversation:
    """The conversation of a record, checked.

    Raises:
        BadRecord: for a missing field, a wrong type or order of roles, an empty answer.
    """
    key = source.messages or ("messages" if "messages" in values else "conversations")
    turns = values.get(key)
    if not isinstance(turns, list) or not turns:
        advice = "Set the source's `messages` to the key of the list"
        raise BadRecord("missing field", f"has no list of messages under {key!r}", advice)
    messages = _with_system(_messages(turns, source), values)
    check_order(messages)
    if messages[-1].role != "assistant":
        problem = f"ends with a turn of the {messages[-1].role}, which nobody answers"
        raise BadRecord("wrong role order", problem, "Correct the record")
    tools = _tools(values.get("tools"))
    return Conversation(_weighted(messages, source), tools, source.train_ends)


def preferences(values: dict[str, Any]) -> Iterator[tuple[str, Conversation]]:
    """The answers of a preference record in their conversations, each with its verdict:
    `chosen` and `rejected`, or `up` or `down`.

    A prompt is under `prompt`, `messages` or `conversations`, or begins `chosen` and
    `rejected` themselves; a single answer is under `completion`, or the last message, with
    its thumb in `label`.

    Raises:
        BadRecord: as `conversation`, and where both answers are equal.
    """
    tools = _tools(values.get("tools"))
    answers = {name: values[name] for name in ("chosen", "rejected") if values.get(name)}
    if len(answers) == 2 and answers["chosen"] == answers["rejected"]:
        raise BadRecord("no preference", "`chosen` and `rejected` are equal", "Correct the record")
    if not answers and isinstance(values.get("label"), bool):
        answers = {"up" if values["label"] else "down": values.get("completion", [])}
    elif len(answers) != 2:
        problem = "has neither `chosen` and `rejected` nor a `label` that is true or false"
        raise BadRecord("missing field", problem, "Correct the record")
    prompt = _turns(values.get("messages", values.get("conversations", values.get("prompt", []))))
    for verdict, answer in answers.items():
        turns = _turns(answer, "assistant")
        whole = bool(turns) and turns[0].role in ("system", "user")
        messages = _with_system(turns if whole else prompt + turns, values)
        check_order(messages)
        if not messages or messages[-1].role != "assistant":
            raise BadRecord("wrong role order", "ends with no answer", "Correct the record")
        yield verdict, Conversation(_weighted(messages, _LAST), tools)


_LAST = ChatSource(type="chat", path="", train_turns="last")


def _turns(found: Any, role: str = "user") -> list[Message]:
    """Messages from a text, one message, or a list of them."""
    if isinstance(found, str):
        found = {"role": role, "content": found}
    return _messages(found if isinstance(found, list) else [found], _LAST)


def _with_system(messages: list[Message], values: dict[str, Any]) -> list[Message]:
    """A system text beside the messages comes first, if they bring none."""
    system = values.get("system")
    if not isinstance(system, str) or not system.strip() or messages[0].role == "system":
        return messages
    return [Message("system", system), *messages]


def _messages(turns: list[Any], source: ChatSource) -> list[Message]:
    return [_message(turn, f"message {k}", source) for k, turn in enumerate(turns, 1)]


def _message(turn: Any, where: str, source: ChatSource) -> Message:
    if not isinstance(turn, dict):
        raise BadRecord("wrong type", f"{where} is no object", "Correct the record")
    role_key = source.role or ("role" if "role" in turn else "from")
    text_key = source.content or ("content" if "content" in turn else "value")
    named = turn.get(role_key)
    role = source.roles.get(named) or ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        known = ", ".join({**ROLES, **source.roles})
        problem = f"{where} has the role {named!r} under {role_key!r}; known are {known}"
        raise BadRecord("unknown role", problem, "Name what it stands for in the source's `roles`")
    weights = WEIGHTS if source.message_weight is None else (source.message_weight,)
    more = {k: v for k, v in turn.items() if k not in (role_key, text_key, *weights)}
    calls = turn.get("tool_calls")
    text = _text(turn.get(text_key), where, text_key, bool(calls))
    if named == "function_call":
        calls, text = text, ""
    if calls:
        more["tool_calls"] = _calls(calls, where)
    else:
        more.pop("tool_calls", None)
    if role == "assistant" and not text.strip() and not calls:
        raise BadRecord("empty answer", f"{where}, the assistant's, is empty", "Remove the record")
    return Message(role, text, _weight(turn, weights, where), more)


def _text(content: Any, where: str, key: str, may_be_missing: bool) -> str:
    """Content as one text: it may come in parts."""
    if content is None and may_be_missing:
        return ""
    if isinstance(content, list):
        return "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        reason = "missing field" if content is None else "wrong type"
        problem = f"{where} has no text under {key!r}"
        raise BadRecord(reason, problem, "Correct the record, or set the source's `content`")
    return content


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        text = next((part[k] for k in ("text", "value", "content") if k in part), None)
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise BadRecord("no text", f"{where} has a part that is no text: {kind!r}", "Take it out")


def _weight(turn: dict[str, Any], keys: tuple[str, ...], where: str) -> float | None:
    """The loss weight that a message states itself, under the first of `keys` that it has."""
    key = next((key for key in keys if turn.get(key) is not None), None)
    if key is None:
        return None
    weight = turn[key]
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        problem = f"{where} has `{key}`: {weight!r}, which is no number of at least 0"
        raise BadRecord("wrong type", problem, "Correct the record")
    return float(weight)


def _weighted(messages: list[Message], source: ChatSource) -> tuple[Message, ...]:
    """The messages with the weights under which they are targets."""
    weights = [
        (1.0 if m.role in source.train_roles else None) if m.weight is None else m.weight
        for m in messages
    ]
    if source.train_turns == "last":
        last = max((k for k, weight in enumerate(weights) if weight), default=-1)
        weights = [weight if k == last else None for k, weight in enumerate(weights)]
    return tuple(
        Message(m.role, m.text, weight, m.more) for m, weight in zip(messages, weights, strict=True)
    )


def check_order(messages: list[Message]) -> None:
    """Raises BadRecord where somebody speaks out of turn."""
    before = ""
    for number, message in enumerate(messages, 1):
        if message.role not in FOLLOWERS[before]:
            after = {"": "at the beginning", "call": "after a call of a tool"}.get(before)
            problem = (
                f"message {number} is of role {message.role} {after or f'after {before}'}; "
                f"{' or '.join(FOLLOWERS[before])} is expected"
            )
            raise BadRecord("wrong role order", problem, "Correct the record")
        before = "call" if message.calls else message.role


def _parsed(value: Any, what: str) -> Any:
    """JSON that may have been written as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRecord("not JSON", f"{what} is not JSON ({error})", "Correct it") from error


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of tools, with their arguments as tables."""
    calls = _parsed(calls, f"the call of {where}")
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = _parsed(function.get("arguments", {}), f"`arguments` of {where}")
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            problem = f"{where} has a call without a `name` or a table of `arguments`"
            raise BadRecord("wrong type", problem, "Correct the record")
        own = {k: v for k, v in call.items() if k in ("id", "index")}
        found.append({"type": "function", "function": {**function, "arguments": arguments}, **own})
    return found


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """The JSON schemas of tools, each as {type: function, function: ...}."""
    listed = _parsed(tools, "`tools`") if tools else []
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise BadRecord("wrong type", "`tools` is no list of objects", "Correct the record")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in listed
    )
