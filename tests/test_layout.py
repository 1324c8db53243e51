from __future__ import annotations

import pytest

from rostra.layout import AXES, Layout, refusals


def test_a_layout_survives_being_written_down() -> None:
    layout = Layout(micro_batch=4, accumulation=2, compute="bf16", compile=True)
    assert Layout.from_dict(layout.to_dict()) == layout
    assert hash(Layout.from_dict(layout.to_dict())) == hash(layout)
    with pytest.raises(ValueError, match="tensors"):
        Layout.from_dict({**layout.to_dict(), "tensors": 2})


def test_world_size_is_the_product_of_the_axes() -> None:
    assert Layout(1, 1, replicate=2, shard=3, tensor=5).world_size == 30


@pytest.mark.parametrize("axis", AXES)
def test_the_table_says_why_a_layout_is_refused(axis: str) -> None:
    assert refusals(Layout(1, 1)) == []
    (rule,) = refusals(Layout(1, 1, **{axis: 2}))
    assert f"parallel.{axis}" in rule.reason
    assert refusals(Layout(1, 1, **{axis: 0}))
