"""Words that are looked up have the tokens that the library gives the whole text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rostra.data.tokenizer import PATTERN, Encoder
from rostra.data.words import Words, ascii_pattern, stretches

# As published with GPT-4o (tiktoken's o200k_base), cl100k_base, and Qwen's, which cuts digits.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
CORPUS = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))[:12]]


def tokenizer_of(splitter: Any, normalizer: Any = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = splitter
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def split(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([cut, byte_level])


KNOWN = {
    "ours": tokenizer_of(split(PATTERN)),
    "gpt2": tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "cl100k": tokenizer_of(split(CL100K)),
    "o200k": tokenizer_of(split(O200K)),
    "qwen": tokenizer_of(split(QWEN), normalizers.NFC()),
}
parts = st.one_of(
    st.sampled_from(CORPUS).flatmap(
        lambda text: st.integers(0, len(text) - 1).map(lambda i: text[i : i + 90])
    ),
    st.sampled_from(
        ["é", "e\u0301", " naïve", "日本語", "\u00a0", "\u2028", "‘quoted’", "<|end|>", "ſ", "K"]
    ),
    st.text(st.characters(max_codepoint=127), max_size=12),
    st.text(max_size=6),
)
texts = st.lists(parts, max_size=8).map("".join)


@pytest.fixture(scope="module", params=KNOWN)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return Encoder(KNOWN[request.param])


@given(some=st.lists(texts, max_size=4))
@settings(max_examples=60)
def test_tokens_are_the_librarys(encoder: Encoder, some: list[str]) -> None:
    assert encoder._words is not None
    expected = encoder._backend.encode_batch(some, add_special_tokens=False)
    found = encoder.encode(some)
    assert [ids[:-1].tolist() for ids in found] == [e.ids for e in expected]


@given(texts)
def test_stretches_are_the_text_and_only_ascii_is_looked_up(text: str) -> None:
    found = list(stretches(text))
    assert "".join(part for _, part in found) == text
    assert all(part.isascii() for known, part in found if known)
    borders = np.cumsum([len(part) for _, part in found])[:-1]
    assert all(re.match(r"[a-z] [a-z]", text[border - 1 : border + 2]) for border in borders)


def test_a_foreign_word_does_not_send_the_whole_text_to_the_library() -> None:
    text = "plain words before it " * 9 + "naïve ideas" + " and plain words after" * 9
    assert [known for known, _ in stretches(text)] == [True, False, True]


@pytest.mark.parametrize(
    "splitter, normalizer",
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (pre_tokenizers.Whitespace(), None),
        (split(r"\p{Greek}+|[^\p{Greek}]+"), None),
        (split(CL100K), normalizers.Lowercase()),
        (split(r"(?<=a)b|\X"), None),  # what `re` does not know
        (split(r"[[:upper:]]+|[^[:upper:]]+"), None),  # what it takes for something else
    ],
)
def test_other_tokenizers_are_asked(splitter: Any, normalizer: Any) -> None:
    tokenizer = tokenizer_of(splitter, normalizer)
    assert Words.of(Encoder(tokenizer)._backend, np.uint16) is None


def test_classes_within_and_without_brackets() -> None:
    found = ascii_pattern(r"[^\p{L}\]]\p{N}{2}|\p{Lo}+")
    assert found is not None
    matching = [text for text in ("-12", "]12", "a12", "-1a") if found.fullmatch(text)]
    assert matching == ["-12"]
