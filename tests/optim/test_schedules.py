from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rostra.config.schema import ScheduleSection
from rostra.optim import make_schedule


def rates(total: int, **section: Any) -> list[float]:
    schedule = make_schedule(ScheduleSection(**section), total)
    return [schedule(step) for step in range(total)]


def test_the_default_warms_up_over_three_per_cent_and_falls_to_a_tenth() -> None:
    found = rates(1000)
    assert found[:30] == pytest.approx([(s + 1) / 30 for s in range(30)])
    assert found[-1] == pytest.approx(0.1)
    half = 30 + (1000 - 30) // 2 - 1
    assert found[half] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)


def test_linear_falls_evenly() -> None:
    found = rates(10, name="linear", warmup=0, final_fraction=0.0)
    assert found == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0], abs=1e-12)


def test_wsd_is_constant_until_its_decay() -> None:
    found = rates(100, name="wsd", warmup=10, decay="20%", final_fraction=0.0)
    assert found[10:80] == [1.0] * 70
    assert all(a > b for a, b in pairwise(found[79:]))
    assert found[-1] == pytest.approx(0, abs=1e-12)


def test_a_longer_wsd_run_has_the_same_stable_part() -> None:
    assert rates(100, name="wsd", warmup=10)[:80] == rates(300, name="wsd", warmup=10)[:80]


@given(
    total=st.integers(1, 300),
    name=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.one_of(st.integers(0, 400), st.just("3%"), st.just("100%")),
    final=st.floats(0, 1),
)
def test_every_schedule_stays_within_its_bounds(
    total: int, name: str, warmup: int | str, final: float
) -> None:
    decay = 0 if warmup == "100%" else "20%"
    found = rates(total, name=name, warmup=warmup, decay=decay, final_fraction=final)
    start = warmup if isinstance(warmup, int) else round(total * float(warmup[:-1]) / 100)
    assert all(0 <= rate <= 1 for rate in found)
    assert all(rate >= final - 1e-9 for rate in found[start:])
    if name != "constant" and start < total:
        assert found[-1] == pytest.approx(final, abs=1e-9)
