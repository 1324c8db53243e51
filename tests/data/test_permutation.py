from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rostra.data.permutation import Permutation

seeds = st.integers(0, 1 << 70)
epochs = st.integers(0, 1 << 40)


@settings(max_examples=150, deadline=None)
@given(seeds, epochs, st.integers(1, 5000))
def test_is_a_bijection_and_the_same_for_scalars(seed: int, epoch: int, size: int) -> None:
    order = Permutation(seed, epoch, size)
    image = order(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))
    some = range(0, size, max(1, size // 7))
    assert [order(index) for index in some] == image[list(some)].tolist()


@settings(max_examples=50, deadline=None)
@given(seeds, epochs, st.integers(200, 5000))
def test_seed_and_epoch_make_other_orders(seed: int, epoch: int, size: int) -> None:
    image = Permutation(seed, epoch, size)(np.arange(size))
    for other in (Permutation(seed + 1, epoch, size), Permutation(seed, epoch + 1, size)):
        assert (other(np.arange(size)) == image).sum() < 12  # one in the mean


def test_a_size_of_ten_billion_needs_no_memory() -> None:
    order = Permutation(1, 0, 10**10)
    image = order(np.arange(10**10 - 5, 10**10))
    assert len(set(image.tolist())) == 5
    assert image.max() < 10**10


@pytest.mark.parametrize("size", [3, 7, 24, 100])
def test_every_place_is_as_likely(size: int) -> None:
    """Chi-squared of where 0 and the last go, and of neighbours' distance, over 4000 seeds."""
    seeds = 4000
    images = np.array(
        [Permutation(seed, 0, size)(np.array([0, 1, size - 1])) for seed in range(seeds)]
    )
    for values in (images[:, 0], images[:, 2], (images[:, 1] - images[:, 0]) % size):
        counts = np.bincount(values, minlength=size)
        cells = counts[1:] if counts[0] == 0 else counts  # a distance is never 0
        expected = seeds / len(cells)
        chi = ((cells - expected) ** 2 / expected).sum()
        degrees = len(cells) - 1
        assert chi < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_outside_the_range_is_refused() -> None:
    with pytest.raises(IndexError):
        Permutation(0, 0, 5)(5)
    with pytest.raises(IndexError):
        Permutation(0, 0, 5)(np.array([-1]))
