"""Text to tokens: a tokenizer loaded, or trained here on the training documents."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rostra.config.data import TokenizerTable
from rostra.data.words import Words, stretches
from rostra.errors import RequestError

if TYPE_CHECKING:  # else imported where it is used: whoever only reads shards can do without
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# In which they are added, whatever their order in the config.
SPECIAL_ORDER = ("bos_token", "eos_token", "unk_token", "pad_token")

# Raise it when the same documents would train another tokenizer.
RECIPE = 1

# The pattern of GPT-4 (tiktoken's cl100k_base): contractions, words with one leading mark or
# space, numbers of at most three digits, runs of marks, line ends, and runs of spaces, of which
# the last goes with the word that follows. Changed for code: a line end takes the indentation
# after it along, so that "):\n        " can be one token (8% fewer tokens for Python's library).
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+[ \t]*)?|\s*[\r\n]+[ \t]*|\s+(?!\S)|\s+"
)

# Characters of a long document that are encoded at once: the tokenizers library takes some
# hundred bytes of memory for each.
_PIECE = 1 << 16
_PIECES = 64  # at once
_BORDER = re.compile(r"(?<=[a-z])(?= [a-z])")


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder or hub id; no code from there is run.

    Raises:
        RequestError: when there is none, or it is not a fast one (a `tokenizer.json`).
    """
    from transformers import AutoTokenizer

    if str(name).startswith((".", "/", "~")) and not Path(name).is_dir():
        raise RequestError(f"{name}: no such folder; give a model's or tokenizer's, or a hub id")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=False)
    except Exception as error:  # transformers and huggingface_hub raise many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise RequestError(
            f"{name}: no tokenizer could be loaded ({reason}). Name a folder that holds one, or "
            "a hub id, or train one with data.tokenizer.vocabulary."
        ) from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise RequestError(
            f"{name}: this tokenizer has no fast form (tokenizer.json), which Rostra needs. "
            "Convert it with transformers, or name another with data.tokenizer.pretrained."
        )
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerFast, table: TokenizerTable) -> int:
    """Apply `data.tokenizer.special` and `.added` in place; the same table always gives the same
    ids.

    A special token that is not in the vocabulary is added, then those of `added` in their order;
    in any text, these are one token each, never cut.

    Returns:
        How many ids there are beyond the old vocabulary: rows that the embeddings may lack.
    """
    before = _size(tokenizer)
    names = [name for name in SPECIAL_ORDER if name in table.special]
    if names:
        tokenizer.add_special_tokens({name: table.special[name] for name in names})
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in table.added])
    return _size(tokenizer) - before


def _size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Highest id + 1; ids may have holes."""
    return int(max(tokenizer.get_vocab().values())) + 1


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) of at most `vocabulary` tokens.

    The vocabulary counts all 256 bytes and one special token, `<|endoftext|>`, which begins and
    ends a document. Decoding gives every text back unchanged. The same texts train the same
    tokenizer; too few texts train a smaller one.
    """
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((part for text in texts for part in pieces(text)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


class Encoder:
    """Documents to tokens, as plain text: a special token's name in a text is only text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # ours to set up
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        spec = json.loads(backend.to_str())
        ends = [tokenizer.bos_token_id, tokenizer.eos_token_id]
        own = {
            "special": tokenizer.special_tokens_map,
            "template": tokenizer.chat_template,
            "length": tokenizer.model_max_length,
        }
        self.hash: str = _hash({"tokenizer": spec, "ends": ends, **own})
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocabulary_size: int = max(ids) + 1
        self.dtype: type[np.uint16] | type[np.uint32] = (
            np.uint16 if self.vocabulary_size <= 1 << 16 else np.uint32
        )
        self._bos, self._eos = (
            np.array([] if end is None else [end], dtype=self.dtype) for end in ends
        )
        self._long_texts_split = _splits_between_words(backend, spec)
        self._words = Words.of(backend, self.dtype)

    def encode(self, texts: list[str]) -> list[NDArray[Any]]:
        """The tokens of each text: [bos] + text + [eos], as far as the tokenizer has these.

        Words of ASCII are looked up, where the tokenizer is such that they can be. Long texts are
        encoded in pieces where that changes nothing, to bound memory.
        """
        documents: list[list[NDArray[Any]]] = [[self._bos] for _ in texts]
        asked: list[tuple[list[NDArray[Any]], int, str]] = []  # of the library; where it goes
        for document, text in zip(documents, texts, strict=True):
            for known, part in ((False, text),) if self._words is None else stretches(text):
                if known and self._words is not None:
                    document.append(self._words.tokens(part))
                    continue
                for piece in pieces(part) if self._long_texts_split else (part,):
                    asked.append((document, len(document), piece))
                    document.append(self._bos)  # until it is known
        long = any(len(piece) >= _PIECE for *_, piece in asked)
        width = _PIECES if long else max(1, len(asked))
        for first in range(0, len(asked), width):
            some = asked[first : first + width]
            texts = [piece for *_, piece in some]
            batch = self._backend.encode_batch_fast(texts, add_special_tokens=False)
            for (document, place, _), encoding in zip(some, batch, strict=True):
                document[place] = np.array(encoding.ids, dtype=self.dtype)
        return [np.concatenate([*ids, self._eos]) for ids in documents]

    def take(self, documents: list[NDArray[np.uint32]]) -> list[tuple[NDArray[Any], str]]:
        """Documents that come in tokens: these in this encoder's type, and their text."""
        texts = self._backend.decode_batch([ids.tolist() for ids in documents])
        return [(ids.astype(self.dtype), text) for ids, text in zip(documents, texts, strict=True)]


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """Parts of a long text, each cut before the space between two words."""
    start = 0
    while len(text) - start > size and (border := _BORDER.search(text, start + size)):
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def _splits_between_words(backend: Tokenizer, spec: dict[str, Any]) -> bool:
    """Whether the tokens of "a b" are those of "a" and of " b" for all words, by its parts.

    So it is for byte-level pre-tokenizers that cut there and nothing that looks beyond:
    normalizers may add a prefix, and added tokens may hold a space.
    """
    normalizer, splitter = spec["normalizer"], backend.pre_tokenizer
    plain = normalizer is None or normalizer["type"] == "NFC"
    special = all(token["special"] for token in spec["added_tokens"])
    if not plain or not special or splitter is None:
        return False
    return [span for _, span in splitter.pre_tokenize_str("ab cd")] == [(0, 2), (2, 5)]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
