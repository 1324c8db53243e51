"""Orders of an epoch: every sample once, and what is shuffled together lies together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rostra.config.loading import LoadTable
from rostra.data.order import WindowOrder, epoch_order
from rostra.data.permutation import Permutation

seeds = st.integers(0, 1 << 65)


@settings(max_examples=50)
@given(
    seed=seeds,
    epoch=st.integers(0, 5),
    size=st.integers(1, 400),
    block=st.integers(1, 60),
    window=st.integers(1, 500),
)
def test_an_epoch_has_each_sample_once(
    seed: int, epoch: int, size: int, block: int, window: int
) -> None:
    order = WindowOrder(seed, epoch, size, min(block, size), window)
    places = order(np.arange(size))
    assert sorted(places.tolist()) == list(range(size))
    some = np.arange(size)[:: max(1, size // 7)]
    assert [order(int(number)) for number in some] == places[some].tolist()


def test_windows_are_shuffled_and_stay_near() -> None:
    """Over an epoch of 10^10 samples: a window lies in few blocks, far from where it is read."""
    size, block, window = 10**10, 8192, 65_536
    order = WindowOrder(1, 0, size, block, window)
    for number in (0, 5, size // window // 2):
        places = order(np.arange(number * window, (number + 1) * window))
        assert len(np.unique(places)) == window
        assert len(np.unique((places - order._first) % size // block)) <= window // block + 1
        assert np.ptp(places) > 1000 * window  # its blocks are from anywhere
        steps = np.abs(np.diff(places))
        assert np.median(steps) > block  # neighbours come from different blocks
    other = WindowOrder(1, 1, size, block, window)(np.arange(1000))
    assert not np.isin(other, order(np.arange(window))).any()


def test_load_says_which_order() -> None:
    def places(size: int = 90, **keys: object) -> list[int]:
        order = epoch_order(LoadTable.model_validate(keys), 3, 1, size, 9)
        return order(np.arange(size)).tolist()

    assert places(shuffle="none") == list(range(90))
    assert places() == Permutation(3, 1, 90)(np.arange(90)).tolist()
    windows = places(shuffle="window", window=10)
    assert sorted(windows) == list(range(90)) != windows != places()
    for first in range(0, 90, 10):  # one block each: a run of ten, going round at the end
        found = sorted(windows[first : first + 10])
        assert found[-1] - found[0] == 9 or {0, 89} <= set(found)
    shuffles = {tuple(np.argsort(windows[first : first + 10])) for first in range(0, 90, 10)}
    assert len(shuffles) == 9
    assert places(0, shuffle="window") == []
    with pytest.raises(IndexError):
        WindowOrder(0, 0, 5, 2, 3)(5)
