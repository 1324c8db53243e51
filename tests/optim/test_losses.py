from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import Ranks
from rostra.batch import IGNORE
from rostra.optim import chunked_cross_entropy, cross_entropy_sum
from rostra.optim.losses import VocabularyShard

SIZE, VOCABULARY = 8, 23


def case(
    positions: int,
    ignored: float = 0.2,
    bias: bool = False,
    weighted: bool = False,
    update: bool = False,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(positions)
    labels = torch.randint(0, VOCABULARY, (positions,), generator=generator)
    labels[torch.rand(positions, generator=generator) < ignored] = IGNORE
    values = {
        "hidden": torch.randn(positions, SIZE, generator=generator).requires_grad_(),
        "weight": torch.randn(VOCABULARY, SIZE, generator=generator).requires_grad_(),
        "labels": labels,
    }
    if weighted:  # by halves, some of them nothing
        values["weights"] = torch.randint(0, 4, (positions,), generator=generator) / 2
    if bias:
        values["bias"] = torch.randn(VOCABULARY, generator=generator).requires_grad_()
    if update:  # by an adapter of rank 3, and the head is frozen
        shapes = ((positions, 3), (VOCABULARY, 3))
        factors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        values["update"] = tuple(factors)
        values["weight"].requires_grad_(False)
    return values


def plain(values: dict[str, Any], softcap: float | None = None) -> Tensor:
    logits = functional.linear(values["hidden"], values["weight"], values.get("bias"))
    if "update" in values:
        narrow, wide = values["update"]
        logits = logits + narrow @ wide.t()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    each = functional.cross_entropy(
        logits.flatten(0, -2), values["labels"].flatten(), ignore_index=IGNORE, reduction="none"
    )
    return (each * values.get("weights", torch.ones(1)).flatten()).sum()


def leaves(values: dict[str, Any]) -> list[Tensor]:
    tensors = [x for name, x in values.items() if name != "update"]
    return [x for x in (*tensors, *values.get("update", ())) if x.requires_grad]


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal relative to the largest value."""
    assert (found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1.0)


def check(values: dict[str, Any], softcap: float | None = None, **options: Any) -> None:
    """Loss, sum and gradients are those of F.cross_entropy on all logits, to 1e-6."""
    scale = 1 / 7
    loss, total = chunked_cross_entropy(**values, scale=scale, softcap=softcap, **options)
    expected = plain(values, softcap)
    assert_close(total, expected.detach(), 1e-6)
    assert_close(loss.detach(), expected.detach() * scale, 1e-6)
    assert not total.requires_grad
    of = leaves(values)
    wanted = torch.autograd.grad(expected * scale, of)
    for ours, theirs in zip(torch.autograd.grad(loss, of), wanted, strict=True):
        assert_close(ours, theirs, 1e-6)


@settings(deadline=None, max_examples=60)
@given(
    positions=st.integers(1, 50),
    chunk=st.integers(1, 60),
    ignored=st.sampled_from([0.0, 0.3, 0.9, 1.1]),
    bias=st.booleans(),
    weighted=st.booleans(),
    update=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
)
def test_equals_cross_entropy(
    positions: int,
    chunk: int,
    ignored: float,
    bias: bool,
    weighted: bool,
    update: bool,
    softcap: float | None,
) -> None:
    check(case(positions, ignored, bias, weighted, update), softcap, chunk=chunk)


def test_compiled_equals_cross_entropy() -> None:
    check(case(40, bias=True, weighted=True), 3.0, chunk=16, compiled=True)
    check(case(40, update=True), chunk=16, compiled=True)


def test_compiles_as_a_part_of_something_larger() -> None:
    values = case(40)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden * 2, weight, labels, scale=0.5, chunk=16)[0]

    expected = plain({**values, "hidden": values["hidden"] * 2}) * 0.5
    found = torch.compile(loss, dynamic=False)(**values)
    assert_close(found.detach(), expected.detach(), 1e-6)
    wanted = torch.autograd.grad(expected, leaves(values))
    for ours, theirs in zip(torch.autograd.grad(found, leaves(values)), wanted, strict=True):
        assert_close(ours, theirs, 1e-6)


def test_keeps_leading_dimensions_and_takes_a_tensor_as_scale() -> None:
    values = case(24)
    shaped = {
        **values,
        "hidden": values["hidden"].view(4, 6, SIZE),
        "labels": values["labels"].view(4, 6),
    }
    loss, _ = chunked_cross_entropy(**shaped, scale=torch.tensor(0.5), chunk=5)
    assert_close(loss.detach(), plain(values).detach() * 0.5, 1e-6)
    loss.backward()
    assert values["hidden"].grad.shape == (24, SIZE)


def test_later_factors_reach_the_gradients() -> None:
    values = case(24)
    loss, _ = chunked_cross_entropy(**values, chunk=7)
    wanted = torch.autograd.grad(plain(values) * 3, leaves(values))
    for ours, theirs in zip(torch.autograd.grad(loss * 3, leaves(values)), wanted, strict=True):
        assert_close(ours, theirs, 1e-6)


def test_autocast_computes_products_in_bfloat16_and_gives_float32_gradients() -> None:
    values = case(64)
    with torch.autocast("cpu", torch.bfloat16):
        loss, total = chunked_cross_entropy(**values, chunk=16)
    assert loss.dtype == total.dtype == torch.float32
    found = torch.autograd.grad(loss, leaves(values))
    assert_close(total, plain(values).detach(), 1e-2)
    for ours, theirs in zip(found, torch.autograd.grad(plain(values), leaves(values)), strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours, theirs, 3e-2)


def test_scale_keeps_float16_gradients_from_vanishing() -> None:
    values = case(16, ignored=0.0)
    low = {
        key: x.detach().half().requires_grad_() if x.is_floating_point() else x
        for key, x in values.items()
    }
    targets = 10_000_000  # of a global batch so large that dz/targets is below float16's least
    loss, _ = chunked_cross_entropy(**low, scale=2.0**16 / targets, chunk=8)
    loss.backward()
    expected = torch.autograd.grad(plain(values) * 2.0**16 / targets, values["hidden"])[0]
    assert_close(low["hidden"].grad.float(), expected, 1e-2)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    values = case(24)
    values[frozen].requires_grad_(False)
    check(values, chunk=10)


def test_without_gradients_only_the_loss_is_computed() -> None:
    values = case(24)
    with torch.no_grad():
        loss, total = chunked_cross_entropy(**values, scale=0.5, chunk=10)
    assert not loss.requires_grad
    assert_close(total, plain(values).detach(), 1e-6)


def test_logits_of_one_chunk_exist_at_once() -> None:
    values, seen = case(40), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == VOCABULARY:
                seen.append(result.shape[0])
            return result

    with Watch():
        chunked_cross_entropy(**values, chunk=16)[0].backward()
    assert max(seen) <= 16


def test_plain_sum() -> None:
    values = case(24, weighted=True)
    logits = (values["hidden"] @ values["weight"].t()).view(4, 6, VOCABULARY)
    labels, weights = (values[key].view(4, 6) for key in ("labels", "weights"))
    found = cross_entropy_sum(logits.bfloat16(), labels, weights)
    assert found.dtype == torch.float32
    assert_close(found.detach(), plain(values).detach(), 1e-2)


def sharded_vocabulary(ignored: float, softcap: float | None, frozen: bool) -> None:
    """Each rank has some rows of the head: the loss is whole, gradients are parts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = case(40, ignored, bias=True, weighted=True)
    values["weight"].requires_grad_(not frozen)
    per = -(-VOCABULARY // size)
    rows = slice(rank * per, (rank + 1) * per)
    mine = {key: values[key].detach()[rows].clone() for key in ("weight", "bias")}
    mine = {key: x.requires_grad_(values[key].requires_grad) for key, x in mine.items()}
    hidden = values["hidden"].detach().clone().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    loss, total = chunked_cross_entropy(
        hidden,
        mine["weight"],
        values["labels"],
        scale=1 / 7,
        chunk=16,
        bias=mine["bias"],
        softcap=softcap,
        vocabulary=VocabularyShard(rank * per, group),
        weights=values["weights"],
    )
    loss.backward()
    expected = plain(values, softcap)
    (expected / 7).backward()
    assert_close(total, expected.detach(), 1e-6)
    assert_close(loss.detach(), expected.detach() / 7, 1e-6)
    summed = hidden.grad
    dist.all_reduce(summed)
    assert_close(summed, values["hidden"].grad, 1e-6)
    assert_close(mine["bias"].grad, values["bias"].grad[rows], 1e-6)
    if frozen:
        assert mine["weight"].grad is None
    else:
        assert_close(mine["weight"].grad, values["weight"].grad[rows], 1e-6)


@pytest.mark.parametrize(
    ("size", "ignored", "softcap", "frozen"),
    [(2, 0.2, None, False), (2, 0.2, 3.0, True), (2, 1.1, None, False), (4, 0.0, 3.0, False)],
)
def test_sharded_vocabulary(
    ranks: Ranks, size: int, ignored: float, softcap: float | None, frozen: bool
) -> None:
    ranks.run(size, sharded_vocabulary, ignored, softcap, frozen)


def test_takes_tensors_without_values() -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(40, SIZE), torch.empty(VOCABULARY, SIZE)
        labels = torch.zeros(40, dtype=torch.long)
        loss, _ = chunked_cross_entropy(hidden.requires_grad_(), weight, labels, chunk=16)
        loss.backward()
    assert hidden.grad.shape == (40, SIZE)
