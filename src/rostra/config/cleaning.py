"""The table `data.clean`: which documents are kept, and what is put right in them.

A filter is off until its name appears (`gopher_quality: {}` takes the published thresholds);
what each measures, and its paper, say the modules of `rostra.data.clean`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from rostra.config.base import Count, Fraction, Section, Whole
from rostra.errors import RequestError

AtLeast0 = Annotated[float, Field(ge=0.0)]


def _number(key: Any) -> Any:
    """JSON has texts for keys, and so has a config that was written out."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


ByN = dict[Annotated[Count, BeforeValidator(_number)], Fraction]


class LengthTable(Section):
    """How long a document may be."""

    min_characters: Whole = Field(0, description="fewer are too few")
    max_characters: Count | None = Field(None, description="more are too many")
    min_words: Whole = Field(0, description="fewer words are too few")
    max_words: Count | None = Field(None, description="more words are too many")

    @model_validator(mode="after")
    def _some_length_is_left(self) -> Self:
        for unit in ("characters", "words"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if most is not None and most < least:
                raise ValueError(f"`max_{unit}: {most}` is below `min_{unit}: {least}`")
        return self


class GopherQualityTable(Section):
    """Quality heuristics of Gopher (Rae et al. 2021, appendix A.1.1)."""

    min_words: Whole = Field(50, description="fewer words are too few")
    max_words: Count = Field(100_000, description="more words are too many")
    min_word_length: AtLeast0 = Field(3.0, description="least mean characters a word")
    max_word_length: AtLeast0 = Field(10.0, description="most mean characters a word")
    max_symbols: AtLeast0 = Field(0.1, description="most hash signs, or ellipses, a word")
    max_bullet_lines: Fraction = Field(0.9, description="most lines that begin with a bullet")
    max_ellipsis_lines: Fraction = Field(0.3, description="most lines that end with an ellipsis")
    min_alphabetic_words: Fraction = Field(0.8, description="least words with a letter in them")
    min_stop_words: Whole = Field(2, description="least different stop words")
    stop_words: tuple[str, ...] = Field(
        ("the", "be", "to", "of", "and", "that", "have", "with"), description="which words count"
    )


class GopherRepetitionTable(Section):
    """Repetition of Gopher (Rae et al. 2021, table A1); all are shares of the document."""

    duplicate_lines: Fraction = Field(0.30, description="most lines that were there before")
    duplicate_paragraphs: Fraction = Field(0.30, description="most paragraphs that were")
    duplicate_line_characters: Fraction = Field(0.20, description="most characters in such lines")
    duplicate_paragraph_characters: Fraction = Field(
        0.20, description="most characters in such paragraphs"
    )
    top_ngrams: ByN = Field(
        {2: 0.20, 3: 0.18, 4: 0.16},
        description="most characters in the n-gram that is most frequent, by n",
    )
    duplicate_ngrams: ByN = Field(
        {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
        description="most characters in n-grams that were there before, by n",
    )


class C4Table(Section):
    """Rules of C4 (Raffel et al. 2020, section 2.2), for lines and for documents."""

    terminal_punctuation: bool = Field(
        True, description="lines that do not end with a mark of punctuation are removed"
    )
    min_line_words: Whole = Field(3, description="lines of fewer words are removed")
    max_word_characters: Count | None = Field(
        1000, description="lines with a longer word are removed"
    )
    javascript: bool = Field(True, description="lines that speak of JavaScript are removed")
    policy: bool = Field(True, description="lines that speak of cookies and terms are removed")
    citations: bool = Field(True, description="marks of citations, such as [1], are removed")
    min_sentences: Whole = Field(5, description="documents left with fewer are rejected")
    lorem_ipsum: bool = Field(True, description="documents with this phrase are rejected")
    curly_bracket: bool = Field(True, description="documents with { are rejected")
    bad_words: str | None = Field(
        None, description="a file of words, one a line; documents with one of them are rejected"
    )


class FineWebTable(Section):
    """Filters of FineWeb (Penedo et al. 2024, section 3.6); shares of lines or characters."""

    min_punctuated_lines: Fraction = Field(
        0.12, description="least lines that end with a mark of punctuation"
    )
    max_short_lines: Fraction = Field(0.67, description="most short lines")
    short_line: Whole = Field(30, description="characters of a line that is short")
    max_duplicate_characters: Fraction = Field(
        0.01, description="most characters in lines that were there before"
    )
    max_newlines: AtLeast0 = Field(0.3, description="most line ends a word")


class LanguageTable(Section):
    """Which languages are kept, as py3langid tells them (extra `clean`)."""

    keep: tuple[str, ...] = Field(min_length=1, description="ISO 639 codes: en, de, zh, ...")
    min_confidence: Fraction = Field(0.65, description="least confidence in the language")


class FunctionTable(Section):
    """A function of the user's own, which the command line must allow: --allow-code FILE.

    It is called with the text and the metadata; it returns the text to go on with, or True to
    keep it as it is, or False or None to reject the document.
    """

    file: str = Field(description="a Python file")
    name: str = Field("keep", description="the function in it")


class PersonalTable(Section):
    """What personal data is masked with; null leaves that kind as it is."""

    email: str | None = Field("email@example.com", description="in place of e-mail addresses")
    ip: str | None = Field("22.214.171.124", description="in place of public IP addresses")


class CleanTable(Section):
    """Which documents are kept, and what is put right in them.

    Filters are applied in the order in which they stand here.
    """

    unicode: bool = Field(
        False, description="repair text that was decoded wrongly, with ftfy (extra `clean`)"
    )
    length: LengthTable | None = None
    gopher_quality: GopherQualityTable | None = None
    gopher_repetition: GopherRepetitionTable | None = None
    c4: C4Table | None = None
    fineweb: FineWebTable | None = None
    language: LanguageTable | None = None
    function: FunctionTable | None = None
    personal: PersonalTable | None = None

    def check_code(self, allowed: Sequence[str | Path]) -> None:
        """Raises RequestError where a user's code would be run from a file that is not allowed:
        a config alone runs no code."""
        asked = self.function
        if asked and Path(asked.file).resolve() not in {Path(path).resolve() for path in allowed}:
            raise RequestError(
                f"data.clean.function: would run {asked.name!r} of {Path(asked.file).resolve()}; "
                f"if you trust that file, add --allow-code {asked.file}"
            )
