"""C4's rules for pages of the web.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", section 2.2, arXiv:1910.10683. The longest word, the phrases of policies and the
marks of citations are not in the paper but in the code published with it.
"""

from __future__ import annotations

import re
from pathlib import Path

from rostra.config.cleaning import C4Table
from rostra.data.clean.page import Page, Reason, below
from rostra.errors import RequestError

KEY = "data.clean.c4.bad_words"
TERMINAL = (".", "?", "!", '"', "'")
ELLIPSIS = "..."
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
POLICY = re.compile(
    r"terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies"
)
# A full stop after an initial or a title ends no sentence.
SENTENCE_END = re.compile(r"(?:[!?]|(?<!\b[A-Z])(?<!\b[MDS][rst])(?<!\bMrs)\.)[.!?]*[\"'”’)\]]*\s+")
UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")  # Thai, Japanese, Chinese


class BadWords:
    """Words that no document may hold: whole words, in any casing, but any part of a text in
    scripts that put no spaces between words."""

    def __init__(self, path: Path) -> None:
        """Read a file of words or phrases, one a line.

        Raises:
            RequestError: when it cannot be read or holds none.
        """
        try:
            lines = path.read_text(encoding="utf-8").lower().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{KEY}: {path}: cannot be read: {error}") from error
        entries = {line.strip() for line in lines} - {""}
        if not entries:
            raise RequestError(f"{KEY}: {path}: holds no words; put one on each line")
        self.words = {entry for entry in entries if re.fullmatch(r"\w+", entry)}
        self.words -= {word for word in self.words if UNSPACED.search(word)}
        self.phrases = sorted(entries - self.words)

    def find(self, text: str) -> str | None:
        """The first of them in a text, or None."""
        lower = text.lower()
        if found := self.words.intersection(re.findall(r"\w+", lower)):
            return min(found)
        return next((p for p in self.phrases if p in lower and _stands_alone(p, lower)), None)


def _stands_alone(phrase: str, text: str) -> bool:
    pattern = rf"(?<!\w){re.escape(phrase)}(?!\w)"
    return bool(UNSPACED.search(phrase) or re.search(pattern, text))


def c4(page: Page, table: C4Table, bad_words: BadWords | None) -> Reason | None:
    """Remove lines that are no sentences of a text, and say why the document is no text."""
    if table.curly_bracket and "{" in page.text:
        return Reason("curly bracket")
    if table.lorem_ipsum and "lorem ipsum" in page.text.lower():
        return Reason("lorem ipsum")
    if bad_words and (word := bad_words.find(page.text)):
        return Reason("bad word", word)
    kept = [line for line in (_line(line, table) for line in page.lines) if line is not None]
    sentences = sum(len(SENTENCE_END.split(line)) for line in kept)
    if found := below("few sentences", sentences, table.min_sentences):
        return found
    page.replace("\n".join(kept).strip())
    return None


def _line(line: str, table: C4Table) -> str | None:
    """The line as it stays, or None."""
    words = line.split()
    if len(words) < table.min_line_words:
        return None
    if table.max_word_characters and len(max(words, key=len, default="")) > (
        table.max_word_characters
    ):
        return None
    line = line.strip()
    if table.citations and "[" in line:
        line = CITATION.sub("", line)
    if table.terminal_punctuation and (not line.endswith(TERMINAL) or line.endswith(ELLIPSIS)):
        return None
    lower = line.lower()
    if (table.javascript and "javascript" in lower) or (table.policy and POLICY.search(lower)):
        return None
    return line
