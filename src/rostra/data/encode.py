"""Examples to tokens with loss weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from rostra.config.data import DataSection
from rostra.config.sources import ChatSource, PreferenceSource
from rostra.data.cache import digest
from rostra.data.chat import ChatTemplate, check_special_tokens
from rostra.data.conversations import Conversation
from rostra.data.examples import Example, Segment, Text, Tokens
from rostra.data.records import BadRecord
from rostra.data.sources import BadRecords
from rostra.data.tokenizer import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Raise it when the same examples would give other tokens or weights.
RECIPE = 1


@dataclass(frozen=True)
class Encoded:
    """An example in tokens.

    Attributes:
        id, where: those of the example.
        tokens: [length], of the encoder's dtype.
        weights: float32 [length]; the loss weight of each token as a target, 0 where it is
            none. The first has no token before it and is never one.
        text_bytes: length of the text in UTF-8.
        ends: targets that end a turn, or the text.
        lookalikes: special tokens that a record's own text turned into.
    """

    id: str
    where: str
    tokens: NDArray[Any]
    weights: NDArray[np.float32]
    text_bytes: int
    ends: int = 0
    lookalikes: int = 0


class ExampleEncoder:
    """Examples to tokens with weights, under the options of `data`.

    Attributes:
        hash: of all that decides tokens and weights: tokenizer, template, options.
        template: the chat template; None where no source of `data` has conversations.
        vocabulary_size: highest token id + 1.
        dtype: of tokens.
        bad: what becomes of bad examples.

    Raises:
        RequestError: when there is no chat template though one is needed, or a special token of
            tokenizer or template is several tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, data: DataSection, bad: BadRecords
    ) -> None:
        plain = Encoder(tokenizer)
        self.vocabulary_size = plain.vocabulary_size
        self.dtype = plain.dtype
        chats = any(isinstance(s, ChatSource | PreferenceSource) for s in data.sources)
        self.template = ChatTemplate.of(data.chat_template, tokenizer) if chats else None
        check_special_tokens(tokenizer, self.template)
        text = self.template.text if self.template else None
        self.hash = digest([RECIPE, plain.hash, text, data.train_on_inputs])
        self._tokenizer, self.bad = tokenizer, bad
        self._inputs = float(data.train_on_inputs)
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # ours to set up
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.post_processor = None  # those that add tokens also trim offsets
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        added = tokenizer.added_tokens_decoder
        self._marks = np.array(sorted(added), np.int64)
        names = sorted((str(token) for token in added.values()), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def encode(self, examples: list[Example]) -> list[Encoded]:
        """The examples in tokens, in their order, without those that were rejected.

        Raises:
            RequestError: for a bad example, under `on_bad_record: fail`.
        """
        found: dict[int, Encoded] = {}
        texts: dict[bool, dict[int, Text]] = {False: {}, True: {}}
        for k, example in enumerate(examples):
            try:
                content = self._resolved(example.content)
                if isinstance(content, Tokens):
                    found[k] = self._taken(example, content)
                else:
                    texts[content.special][k] = content
            except BadRecord as problem:
                problem.reject(example.where, self.bad)
        for special, some in texts.items():
            self._backend.encode_special_tokens = not special  # else their names are only text
            whole = ["".join(s.text for s in text.segments) for text in some.values()]
            encodings = self._backend.encode_batch(whole, add_special_tokens=False)
            for (k, text), encoding in zip(some.items(), encodings, strict=True):
                try:
                    found[k] = self._encoded(examples[k], text, encoding)
                except BadRecord as problem:
                    problem.reject(examples[k].where, self.bad)
        return [found[k] for k in sorted(found)]

    def _resolved(self, content: Text | Conversation | Tokens) -> Text | Tokens:
        """Conversations as text, and every segment with its weight."""
        if isinstance(content, Conversation):
            if self.template is None:
                raise ValueError("no source of the config has conversations")
            segments = self.template.segments(content, self._inputs)
            written = tuple(message.text for message in content.messages)
            return Text(segments, special=True, bounded=False, written=written)
        if isinstance(content, Tokens):
            return content
        weighted = (
            Segment(s.text, self._inputs if s.weight is None else s.weight)
            for s in content.segments
        )
        return replace(content, segments=tuple(s for s in weighted if s.text))

    def _encoded(self, example: Example, text: Text, encoding: Encoding) -> Encoded:
        ids = np.array(encoding.ids, self.dtype)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        weights, last = _spread(offsets, text.segments)
        ends = int(np.isin(ids[last], self._marks).sum())
        if text.bounded:
            if self._bos is not None and ids[:1].tolist() != [self._bos]:
                ids, weights = np.insert(ids, 0, self._bos), np.insert(weights, 0, 0)
            if self._eos is not None and ids[-1:].tolist() != [self._eos]:
                final = text.segments[-1].weight or 0.0
                ids, weights = np.append(ids, self.dtype(self._eos)), np.append(weights, final)
                ends += final > 0
        size = sum(len(segment.text.encode()) for segment in text.segments)
        names = self._names.findall if text.special else lambda _: ()
        lookalikes = sum(len(names(written)) for written in text.written)
        return _sealed(Encoded(example.id, example.where, ids, weights, size, ends, lookalikes))

    def _taken(self, example: Example, given: Tokens) -> Encoded:
        """Tokens of another's making."""
        odd = [id for id in given.ids if not 0 <= id < self.vocabulary_size]
        if odd:
            problem = f"holds token {odd[0]}; the vocabulary has 0 to {self.vocabulary_size - 1}"
            advice = "Make the tokens with the tokenizer of the config"
            raise BadRecord("not in the vocabulary", problem, advice)
        ids, weights = np.array(given.ids, self.dtype), np.array(given.weights, np.float32)
        ends = int((np.isin(ids, self._marks) & (weights > 0)).sum())
        size = len(self._tokenizer.decode(given.ids).encode())
        return _sealed(Encoded(example.id, example.where, ids, weights, size, ends))


def _sealed(encoded: Encoded) -> Encoded:
    """Raises BadRecord when nothing of the example is a target."""
    encoded.weights[:1] = 0
    if not encoded.weights.any():
        advice = "Look at its roles and loss weights, or remove it"
        raise BadRecord("no target", "has no token to train on", advice)
    return encoded


def _spread(
    offsets: NDArray[np.int64], segments: tuple[Segment, ...]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The weight of each token: the highest of the segments that it has characters of, as a
    piece may begin with the space before an answer, or end with the line end after it.

    Args:
        offsets: [tokens, 2], characters where each begins and ends.

    Returns:
        The weights, float32 [tokens], and the tokens that end a trained segment.
    """
    if not len(offsets):
        return np.zeros(0, np.float32), np.zeros(0, np.int64)
    bounds = np.cumsum([len(segment.text) for segment in segments])
    values = np.array([segment.weight for segment in segments], np.float32)
    first = np.searchsorted(bounds[:-1], offsets[:, 0], side="right")
    final = np.searchsorted(bounds[:-1], np.max(offsets - [0, 1], axis=1), side="right")
    weights = np.maximum(values[first], values[final])
    for token in np.flatnonzero(final - first > 1):
        weights[token] = values[first[token] : final[token] + 1].max()
    ends = np.searchsorted(offsets[:, 0], bounds[values > 0] - 1, side="right") - 1
    return weights, np.maximum(ends, 0)
