"""The label audit: what is trained, checked and shown before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rostra.data.encode import Encoded
from rostra.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHOWN_TOKENS = 160  # of one side of a long example
TRAINED, MASKED = "bold green", "dim"
# Beside colours, which pipes and some eyes do not have: what stands around trained tokens.
OPEN, CLOSE, BORDER = "⟦", "⟧", "·"


@dataclass
class Audit:
    """Counts of the examples that are to be tuned on, and what speaks against starting.

    That an example has no target, or a template drops text, is refused for each example as it
    is encoded (`rostra.data.encode`).
    """

    examples: int = 0
    tokens: int = 0
    targets: int = 0
    ends: int = 0  # targets that end a turn or the text
    endless: int = 0  # examples without such
    lookalikes: int = 0  # special tokens that come from a record's own text
    lengths: Counter[int] = field(default_factory=Counter)  # by the next power of two
    suspects: list[str] = field(default_factory=list)  # places of a few look-alikes

    def add(self, encoded: Encoded) -> None:
        """Count an example."""
        length = len(encoded.tokens)
        self.examples += 1
        self.tokens += length
        self.targets += int((encoded.weights > 0).sum())
        self.ends += encoded.ends
        self.endless += not encoded.ends
        self.lookalikes += encoded.lookalikes
        self.lengths[1 << (length - 1).bit_length()] += 1
        if encoded.lookalikes and len(self.suspects) < 3:
            self.suspects.append(encoded.where)

    def check(self) -> None:
        """Raises RequestError when there is nothing to tune on, or no end is ever a target."""
        if not self.examples:
            raise RequestError(
                "data.sources: no example is left to tune on; correct the records that were "
                "skipped, or add others."
            )
        if not self.ends:
            raise RequestError(
                f"data: in none of the {self.examples:,} examples is an end-of-turn or eos token "
                "a target, so the model would never learn to stop. Set "
                "data.tokenizer.special.eos_token, or choose a chat template that ends turns "
                "with a special token (data.chat_template); for input_output, end the last "
                "trained segment with the eos token's text."
            )

    def notices(self) -> list[str]:
        """What a person should know, though it is no reason to stop."""
        found = []
        if self.lookalikes:
            found.append(
                f"{self.lookalikes:,} names of special tokens in the records' own texts became "
                f"special tokens; see {'; '.join(self.suspects)}"
            )
        if 0 < self.endless < self.examples:
            found.append(
                f"{self.endless:,} of {self.examples:,} examples train no end-of-turn or eos token"
            )
        return found

    def counts(self) -> dict[str, Any]:
        """For JSON: `lengths` counts examples by the power of two that their length is at most."""
        lengths = {str(size): self.lengths[size] for size in sorted(self.lengths)}
        names = ("examples", "tokens", "targets", "ends", "endless", "lookalikes")
        return {name: getattr(self, name) for name in names} | {"lengths": lengths}

    def show(self, console: Console) -> None:
        """The share of targets."""
        share = self.targets / max(1, self.tokens)
        console.print(f"{self.targets:,} targets ({share:.0%} of tokens)")


def show_examples(
    console: Console,
    examples: Sequence[Encoded],
    tokenizer: PreTrainedTokenizerFast,
    count: int,
) -> None:
    """Print the first `count` examples token by token.

    Trained runs of tokens are bright and stand in double brackets, masked ones are dim; tokens
    are parted by dots; a weight that is neither 0 nor 1 stands before its run.
    """
    for example in examples[:count]:
        targets = int((example.weights > 0).sum())
        console.rule(
            Text(f"{example.where}: {len(example.tokens):,} tokens, {targets:,} targets"),
            align="left",
        )
        console.print(_shown(example, tokenizer), soft_wrap=False)
    legend = Text("trained tokens: ")
    legend.append(f"{OPEN}like{BORDER}these{CLOSE}", TRAINED)
    legend.append("  masked: ")
    legend.append(f"like{BORDER}these", MASKED)
    console.print(legend)


def _shown(example: Encoded, tokenizer: PreTrainedTokenizerFast) -> Text:
    """All tokens of an example, or the first and last of a long one."""
    length = len(example.tokens)
    text = Text()
    if length <= 2 * SHOWN_TOKENS:
        return _run_on(text, example, 0, length, tokenizer)
    _run_on(text, example, 0, SHOWN_TOKENS, tokenizer)
    text.append(f"\n … {length - 2 * SHOWN_TOKENS:,} tokens …\n", "italic")
    return _run_on(text, example, length - SHOWN_TOKENS, length, tokenizer)


def _run_on(
    text: Text, example: Encoded, start: int, stop: int, tokenizer: PreTrainedTokenizerFast
) -> Text:
    """Append tokens `start` to `stop`, in runs of one weight."""
    weights = example.weights[start:stop].tolist()
    pieces = _pieces(example.tokens[start:stop].tolist(), tokenizer)
    first = 0
    while first < len(pieces):
        last = first
        while last < len(pieces) and weights[last] == weights[first]:
            last += 1
        said, weight = BORDER.join(pieces[first:last]), weights[first]
        if weight > 0:
            label = "" if weight == 1 else f"{weight:g}×"
            text.append(f"{label}{OPEN}{said}{CLOSE}", TRAINED)
        else:
            text.append(said, MASKED)
        first = last
    return text


def _pieces(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """What each token adds to the text; a token that ends within a character adds nothing."""
    pieces, before = [], ""
    for stop in range(1, len(ids) + 1):
        text = tokenizer.backend_tokenizer.decode(ids[:stop], skip_special_tokens=False)
        if text.endswith("\ufffd") and stop < len(ids):
            text = before
        pieces.append("".join(map(_visible, text[len(before) :])))
        before = text
    return pieces


def _visible(character: str) -> str:
    """Line ends are shown and kept; what would command a terminal is only shown."""
    if character == "\n":
        return "⏎\n"
    return character if character.isprintable() else character.encode("unicode_escape").decode()
