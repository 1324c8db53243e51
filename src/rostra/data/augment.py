"""Variants of examples for small sets: prompts in other words, other system prompts, noise.

Records of one prompt are varied before they become examples, so that every format of prompts
works as ever; conversations are varied after they were read, so that every dialect does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

from rostra.config.augmenting import AugmentTable
from rostra.config.sources import (
    AlpacaSource,
    ExampleSource,
    MappingSource,
    PromptSource,
    SquadSource,
)
from rostra.data.conversations import Conversation, Message

GAP = re.compile(r"(\s+)")
CASINGS = (str.lower, str.upper, str.title)


def varies(source: ExampleSource) -> bool:
    """Whether records of this source have prompts of which there can be variants."""
    return isinstance(source, PromptSource)


@dataclass
class Variant:
    """One variant of one record. What its methods return depends on these values alone.

    Targets are never changed, nor a text from which they are taken (SQuAD's contexts). Variants 1
    to n of a record have different wordings where the table has n prompts that fit, and different
    system prompts where it has n.

    Attributes:
        number: from 0 to table.variants - 1; variant 0 is the record itself.
        id: the record's, one of its own in the whole data.
        seed: another one gives other variants.
    """

    table: AugmentTable
    number: int
    id: str
    seed: int

    @cached_property
    def _turn(self) -> int:
        """Where in a list this variant stands: they take turns, from where the id says."""
        return Random(f"{self.seed}:{self.id}").randrange(1 << 30) + self.number

    def values(self, values: dict[str, Any], source: ExampleSource) -> dict[str, Any]:
        """The values of a record with one prompt (alpaca, mapping, squad); others as they are.

        A value that is missing or of a wrong type stays, for the reader of the source to tell.
        """
        match source:
            case AlpacaSource():
                asked, given, system = "instruction", "input", ""
            case MappingSource():
                asked, given = source.field_instruction, source.field_input
                system = source.field_system
            case SquadSource():
                asked, given, system = "question", "", ""
            case _:
                return values
        beside = values.get(given) or ""
        if not (self.number and isinstance(values.get(asked), str) and isinstance(beside, str)):
            return values
        random = self._random("values")
        prompt, left = self._worded(values[asked], beside)
        changed = {**values, asked: self._noisy(prompt, random)}
        if given in values:
            changed[given] = self._noisy(left, random)
        if system and self.table.systems:
            changed[system] = self._system
        return changed

    def conversation(self, talk: Conversation) -> Conversation:
        """A conversation with its first question in other words, noise in all questions, and
        another system prompt, also where it had none."""
        if not self.number:
            return talk
        random, messages = self._random("conversation"), list(talk.messages)
        prompts = [k for k, m in enumerate(messages) if m.role == "user" and not m.weight]
        for k in prompts:
            text = messages[k].text
            worded = self._worded(text, "")[0] if k == prompts[0] else text
            messages[k] = replace(messages[k], text=self._noisy(worded, random))
        if self.table.systems and messages[0].role != "system":
            messages.insert(0, Message("system", self._system))
        elif self.table.systems and not messages[0].weight:
            messages[0] = replace(messages[0], text=self._system)
        return replace(talk, messages=tuple(messages))

    def _random(self, what: str) -> Random:
        return Random(f"{self.seed}:{self.id}:{self.number}:{what}")

    @property
    def _system(self) -> str:
        return self.table.systems[self._turn % len(self.table.systems)]

    def _worded(self, instruction: str, given: str) -> tuple[str, str]:
        """An instruction in other words, and the input that is left beside it."""
        fit = [p for p in self.table.prompts if given.strip() or "{input}" not in p]
        if not fit:
            return instruction, given
        wording = fit[self._turn % len(fit)]
        left = "" if "{input}" in wording else given
        return wording.format(instruction=instruction, input=given), left

    def _noisy(self, text: str, random: Random) -> str:
        """The text with some words in another casing, and some gaps between words doubled."""
        if not (self.table.casing or self.table.whitespace):
            return text
        pieces = GAP.split(text)  # words and gaps by turns
        for k, piece in enumerate(pieces):
            if k % 2:
                pieces[k] = piece * (1 + (random.random() < self.table.whitespace))
            elif random.random() < self.table.casing:
                pieces[k] = random.choice(CASINGS)(piece)
        return "".join(pieces)
