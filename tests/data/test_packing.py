from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rostra.batch import IGNORE, Batch
from rostra.data import Loader, Packed, rows
from rostra.data.rows import Cut, Pieces, best_fit
from rostra.data.shards import Shards, open_shard
from rostra.data.writer import ShardWriter
from rostra.errors import RequestError
from rostra.models.attention import NAME, register
from rostra.store import sha256_file

Weights = list[list[float]]
PAD = 7  # among the first tokens, which no example has: those count from 100

# Some examples: the weight of each token as a target, of which one at least counts.
examples = st.lists(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.5]), min_size=2, max_size=30).filter(
        lambda weights: any(weights[1:])
    ),
    min_size=1,
    max_size=25,
)


def write(folder: Path, examples: Sequence[list[float] | int], shard_tokens: int = 40) -> Shards:
    """Examples (or documents, of which only the length is given) whose tokens count on, so that
    every token tells where it is from."""
    writer = ShardWriter(folder, "train", np.uint32, shard_tokens, keep_text=False)
    at = 100
    for number, each in enumerate(examples):
        length = each if isinstance(each, int) else len(each)
        weights = None if isinstance(each, int) else np.array(each, dtype=np.float32)
        tokens = np.arange(at, at := at + length, dtype=np.uint32)
        writer.add(f"e{number}", "", tokens, 0, weights)
    writer.close()
    hashes = {shard.file: sha256_file(folder / shard.file) for shard in writer.closed}
    return Shards(writer.closed, lambda name: open_shard(folder / name, hashes[name]))


def prompts(*lengths: int) -> Weights:
    """Examples of these lengths, the latter half of each trained."""
    return [[float(k >= length // 2) for k in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


def closed(name: str) -> Any:
    raise AssertionError(f"{name} was opened")


def whole(samples: Packed) -> Batch:
    return samples.batch(np.arange(len(samples)))


def pieces_of(batch: Batch) -> list[list[int]]:
    """The tokens of each piece in a batch, found by position ids; padding is left away."""
    found: list[list[int]] = []
    for tokens, positions in zip(
        batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True
    ):
        for token, position in zip(tokens, positions, strict=True):
            if position == 0:
                found.append([])
            assert len(found[-1]) == position
            found[-1].append(token)
    return [piece for piece in found if piece[0] != PAD]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_each_item_goes_into_the_fullest_row_with_room(lengths: list[int]) -> None:
    rows = best_fit(np.array(lengths), 20)
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, room in enumerate(rooms) if room >= length]
        row = min(fitting, key=rooms.__getitem__, default=len(rooms))
        rooms[row:] = [*rooms[row:], 20] if row == len(rooms) else rooms[row:]
        rooms[row] -= length
    filled = np.bincount(rows, lengths)
    assert sorted(20 - filled) == sorted(rooms)  # equal rooms may be swapped
    assert sum(filled <= 10) <= 1


@settings(max_examples=40, deadline=None)
@given(
    examples=examples,
    length=st.integers(3, 24),
    policy=st.sampled_from(["drop", "truncate", "split"]),
    packing=st.sampled_from(["best_fit", "none"]),
    full=st.booleans(),
    shard_tokens=st.integers(1, 200),
)
def test_samples_hold_every_example_once(
    folder: Path,
    examples: Weights,
    length: int,
    policy: Any,
    packing: Any,
    full: bool,
    shard_tokens: int,
) -> None:
    """Whole, in rows that are not too long, with the labels and weights of its targets."""
    shards = write(folder, examples, shard_tokens)
    starts = (100 + np.cumsum([0, *map(len, examples)])).tolist()
    expected, weight = [], dict[int, float]()
    for start, weights in zip(starts, examples, strict=False):
        weight |= {start + k: w for k, w in enumerate(weights)}
        size, step = len(weights), length - 1
        cuts = {
            "drop": [(0, size)] if size <= length else [],
            "truncate": [(0, min(size, length))],
            "split": [(k, min(k + length, size)) for k in range(0, max(1, size - 1), step)],
        }[policy]
        expected += [
            list(range(start + a, start + b))
            for a, b in cuts
            if any(w > 0 for w in weights[a + 1 : b])
        ]
    options: Any = {"packing": packing, "long_examples": policy, "full_rows": full, "pad": PAD}
    samples = Packed(shards, length, 3, **options)
    if not expected:
        assert len(samples) == 0
        return
    batch = Loader(samples, 4).batch(0, len(samples))
    assert sorted(pieces_of(batch)) == expected
    assert samples.tokens == sum(map(len, expected)) == int((batch.input_ids != PAD).sum())
    assert samples.padding(len(samples)) == pytest.approx(1 - samples.tokens / batch.labels.numel())
    if packing == "none":
        longest = max(map(len, expected))
        width = length if full else min(length, -(-longest // 8) * 8)
        assert batch.labels.shape == (len(expected), width)
    _check_labels(batch, weight, samples.pieces.counts.targets)
    if policy == "split":  # each target is in one piece, and counts there
        assert batch.targets == sum(w > 0 for weights in examples for w in weights[1:])


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=25),
    length=st.integers(3, 24),
    overlap=st.integers(1, 8),
    packing=st.sampled_from(["best_fit", "chunk"]),
    shard_tokens=st.integers(1, 200),
)
def test_documents_are_cut_only_where_they_must_be(
    folder: Path, lengths: list[int], length: int, overlap: int, packing: Any, shard_tokens: int
) -> None:
    """Every token of a document but its first is a target once; what is repeated is context."""
    overlap = 1 if packing == "best_fit" else min(overlap, length - 1)
    shards = write(folder, lengths, shard_tokens)
    samples = Packed(
        shards, length, 3, packing=packing, long_examples="split", overlap=overlap, pad=PAD
    )
    starts = (100 + np.cumsum([0, *lengths])).tolist()
    expected = []
    for start, size in zip(starts, lengths, strict=False):
        firsts = range(0, max(1, size - overlap), length - overlap)
        expected += [list(range(start + k, start + min(k + length, size))) for k in firsts]
    expected = [piece for piece in expected if len(piece) > 1]
    if not expected:
        assert len(samples) == 0
        return
    batch = whole(samples)
    assert sorted(pieces_of(batch)) == expected
    if packing == "chunk":
        assert len(batch) == len(expected)
    targets = [start + k for start, n in zip(starts, lengths, strict=False) for k in range(1, n)]
    assert sorted(batch.labels[batch.labels != IGNORE].tolist()) == targets
    here = batch.labels != IGNORE
    assert torch.equal(batch.labels[here], batch.input_ids[here] + 1)
    assert samples.pieces.counts.targets == len(targets)


def test_rows_are_made_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start opens no shard; broken rows are made anew; as they are where none can be kept."""
    monkeypatch.setattr(rows, "BLOCK_TOKENS", 100)
    lengths = np.random.default_rng(5).integers(0, 70, 80).tolist()
    shards = write(tmp_path, lengths, 60)

    cut = Cut(24, long="split")
    made = Pieces(shards, cut, tmp_path)
    assert len(made.counts.rows) > 10
    unkept = Pieces(shards, cut)
    (kept,) = tmp_path.glob("rows-*")
    again = pickle.loads(pickle.dumps(Pieces(Shards(shards.counts, closed), cut, tmp_path)))
    assert made.counts == again.counts == unkept.counts

    def all_rows(pieces: Pieces) -> list[Any]:
        return [pieces.row(index).tolist() for index in range(len(pieces))]

    assert all_rows(made) == all_rows(again) == all_rows(unkept)
    firsts = [row[0][0] for row in all_rows(made)]
    assert firsts == sorted(firsts)  # neighbours lie near each other
    for name in ("3-pieces.npy", "4-starts.npy", "manifest.json"):
        content = bytearray((kept / name).read_bytes())
        content[-40] ^= 1
        (kept / name).write_bytes(content)
        assert all_rows(Pieces(shards, cut, tmp_path)) == all_rows(unkept)
    assert len(list(tmp_path.glob("rows-*"))) == 1
    assert len(Pieces(shards, Cut(30, long="split"), tmp_path)) < len(made)


def _check_labels(batch: Batch, weight: dict[int, float], targets: int) -> None:
    """Against the definition, position by position."""
    inputs, labels, positions = (x.tolist() for x in list(batch.tensors().values())[:3])
    counted = batch.weights.tolist() if batch.weights is not None else None
    assert (counted is None) == all(w in (0, 1) for w in weight.values())
    assert batch.targets == targets
    for row, tokens in enumerate(inputs):
        for t, _ in enumerate(tokens):
            following = t + 1 < len(tokens) and positions[row][t + 1] > 0
            value = weight.get(tokens[t + 1], 0) if following else 0
            assert labels[row][t] == (tokens[t + 1] if value else IGNORE)
            if counted is not None:
                assert counted[row][t] == value


@settings(max_examples=25, deadline=None)
@given(
    examples=examples,
    seed=st.integers(0, 1 << 65),
    ranks=st.integers(1, 6),
    options=st.sampled_from([{}, {"packing": "none"}, {"packing": "none", "group": 6}]),
)
def test_samples_do_not_depend_on_ranks(
    folder: Path, examples: Weights, seed: int, ranks: int, options: Any
) -> None:
    """Over epochs: what ranks read for a step is the step that one would read, and every epoch
    has every sample once."""
    shards = write(folder, examples)
    samples = Packed(shards, 30, seed, **options)
    loader, count = Loader(samples, 6), len(samples)
    again = Loader(Packed(shards, 30, seed, **options), 6)  # as another process has it
    steps = 2 * count // 6 + 1
    alone = [loader.batch(6 * step, 6) for step in range(steps)]
    for step in reversed(range(steps)):  # whatever was asked for before
        shares = np.array_split(np.arange(6 * step, 6 * step + 6), ranks)
        parts = [again.batch(int(share[0]), len(share)) for share in shares]
        for name, tensor in alone[step].tensors().items():
            assert torch.equal(torch.cat([part.tensors()[name] for part in parts]), tensor)
    for epoch in range(3):
        indices = samples.order(epoch)(np.arange(count))
        assert sorted(indices.tolist()) == list(range(count))
    assert loader.locate(count).documents == samples.document_ids(int(samples.order(1)(0)))


def test_groups_are_of_one_length_in_random_order(folder: Path) -> None:
    lengths = np.random.default_rng(1).integers(4, 200, 203).tolist()
    shards = write(folder, prompts(*lengths), 2000)
    plain, grouped = (
        Packed(shards, 200, 3, packing="none", full_rows=False, group=group, pad=PAD)
        for group in (None, 8)
    )
    assert grouped.padding(8) < 0.06
    assert plain.padding(8) > 0.25
    loader, orders = Loader(grouped, 8), []
    for epoch in range(3):  # steps are groups, also where an epoch does not begin with a step
        first = -(-epoch * 203 // 8)
        widths = [loader.batch(8 * step, 8).labels.shape[1] for step in range(first, first + 24)]
        assert widths != sorted(widths)
        orders.append(widths)
        spread = [
            max(sizes) - min(sizes)
            for step in range(first, first + 24)
            for sizes in [[len(p) for p in pieces_of(loader.batch(8 * step, 8))]]
        ]
        assert max(spread) < 40
    assert orders[0] != orders[1] != orders[2]


def test_long_examples_are_counted_aloud(folder: Path) -> None:
    examples = [*prompts(9, 10, 11, 30), [0.0] * 25 + [1.0]]
    shards = write(folder, examples)
    said: list[str] = []
    for policy in ("drop", "truncate", "split"):
        Packed(shards, 10, 0, long_examples=policy, notice=said.append)
    assert said == [
        "3 of 5 examples are longer than data.sequence_length (10): left out (data.long_examples)",
        "3 of 5 examples are longer than data.sequence_length (10): truncated (data.long_examples)",
        "2 of 5 examples are without a target (data.long_examples)",
        "3 of 5 examples are longer than data.sequence_length (10): split (data.long_examples)",
    ]
    with pytest.raises(RequestError, match=r"e2: this example has 11 tokens, .*long_examples"):
        Packed(shards, 10, 0, long_examples="fail")
    Packed(shards, 30, 0, long_examples="fail", notice=pytest.fail)


def model_of(family: str, attention: str) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
    }
    if family == "gemma3_text":
        sizes |= {"sliding_window": 6, "tie_word_embeddings": True}
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa", NAME])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_logits_of_a_packed_example_are_those_of_it_alone(
    folder: Path, family: str, attention: str
) -> None:
    """In rows with others and with padding; and the padding sees no example."""
    samples = Packed(write(folder, prompts(3, 12, 9, 17, 5, 2, 14, 8)), 24, 0, pad=PAD)
    model, batch = model_of(family, attention), whole(samples)
    inputs = batch.input_ids % 99
    with torch.no_grad():
        packed = model(inputs, position_ids=batch.position_ids, use_cache=False).logits
        crossing = model(inputs, use_cache=False).logits
        pieces: NDArray[np.int64] = np.argwhere(batch.position_ids.numpy() == 0)
        for (row, begin), (following, next_begin) in zip(
            pieces, [*pieces[1:], (len(inputs), 0)], strict=True
        ):
            here = slice(begin, next_begin if following == row else None)
            alone = model(inputs[row, here][None], use_cache=False).logits[0]
            torch.testing.assert_close(packed[row, here], alone, atol=1e-5, rtol=1e-5)
            if begin > 0:  # without position ids it would be another
                assert (crossing[row, here] - alone).abs().max() > 0.01
