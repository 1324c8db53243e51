from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rostra.data.tokenizer import END_OF_TEXT, Encoder, load_tokenizer, pieces, train_tokenizer
from rostra.errors import RequestError

TEXTS = [
    "def function(value):\n        return value + 1234567\n\n" * 20,
    "It's the quick brown fox, don't you know? naïve café 紅樓夢\r\n" * 20,
    "".join(map(chr, range(32, 400))),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(iter(TEXTS), 500)


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    return Encoder(tokenizer)


@settings(max_examples=300, deadline=None)
@given(text=st.text() | st.text(alphabet=" \n\t\r'sa1_(é<|endoftext>") | st.just(END_OF_TEXT))
def test_every_text_comes_back(
    tokenizer: PreTrainedTokenizerFast, encoder: Encoder, text: str
) -> None:
    ids = encoder.encode([text])[0]
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer.eos_token_id not in ids[1:-1]  # text never turns into a special token
    assert tokenizer.decode(ids[1:-1]) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=" \nabcé'1.", max_size=300), size=st.integers(1, 40))
def test_pieces_change_nothing(encoder: Encoder, text: str, size: int) -> None:
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    whole = encoder.encode([text])[0]
    joined = [ids[1:-1] for ids in encoder.encode(parts)]
    assert np.concatenate([whole[:1], *joined, whole[-1:]]).tolist() == whole.tolist()


def test_a_long_text_is_encoded_as_it_would_be_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    text = " ".join(TEXTS) * 200
    whole = tokenizer.backend_tokenizer.encode(text).ids
    one, other = Encoder(tokenizer).encode([text, "and more"])
    assert one[1:-1].tolist() == whole
    assert tokenizer.decode(other[1:-1]) == "and more"


def test_code_and_numbers_are_cut_well(tokenizer: PreTrainedTokenizerFast) -> None:
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    said = [
        text.replace("Ġ", " ").replace("Ċ", "\n")
        for text, _ in cut("f(x):\n        return 1234567")
    ]
    assert said == ["f", "(x", "):\n        ", "return", " ", "123", "456", "7"]


def test_training_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_tokenizer(iter(TEXTS), 450).save_pretrained(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "tokenizer.json" in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_vocabulary_has_all_bytes_and_one_special(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 500
    assert tokenizer.bos_token == tokenizer.eos_token == END_OF_TEXT
    smallest = train_tokenizer(iter(["abc"]), 257)
    assert len(smallest) == 257
    assert smallest.decode(Encoder(smallest).encode(["é\0z"])[0][1:-1]) == "é\0z"


def test_hash_tells_behaviour(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    first = Encoder(tokenizer).hash
    assert Encoder(load_tokenizer(tmp_path)).hash == first
    loaded = load_tokenizer(tmp_path)
    loaded.backend_tokenizer.enable_truncation(5)  # a setting of a call, which Encoder undoes
    assert Encoder(loaded).hash == first
    hashes = {first, Encoder(train_tokenizer(iter(TEXTS[:2]), 500)).hash}
    for change in ({"eos_token": None}, {"bos_token": "a"}):
        loaded = load_tokenizer(tmp_path)
        for name, value in change.items():
            setattr(loaded, name, value)
        hashes.add(Encoder(loaded).hash)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["model"]["merges"] = spec["model"]["merges"][:-1]
    hashes.add(
        Encoder(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)))).hash
    )
    assert len(hashes) == 5


def test_ends_and_width_follow_the_tokenizer() -> None:
    words = {f"w{k}": k for k in range(70_000)} | {"<s>": 70_000}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))
    (ids,) = encoder.encode(["w1 w69999"])
    assert ids.dtype == np.uint32
    assert ids.tolist() == [70_000, 1, 69_999]
    assert encoder.vocabulary_size == 70_001


def test_tokenizers_that_add_a_prefix_get_whole_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Prepend("_")
    prefixed = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = "some words and " * 20_000
    assert Encoder(prefixed).encode([text])[0].tolist() == backend.encode(text).ids


def test_no_tokenizer_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RequestError, match=r"nothing: no such folder"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["x.X", null]}}'
    )
    (tmp_path / "x.py").write_text("raise SystemExit('code of a model folder was run')")
    with pytest.raises(RequestError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
