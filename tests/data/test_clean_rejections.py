"""Counts of rejected documents add up in any order."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from rostra.data.clean import Rejection, Rejections

DOCUMENTS = st.tuples(
    st.sampled_from("abcde"), st.text(max_size=3), st.sampled_from(["short", "long"])
)
TASKS = st.lists(st.lists(DOCUMENTS, max_size=6), min_size=3, max_size=3)


def counted(documents: list[tuple[str, str, str]]) -> Rejections:
    found = Rejections(limit=2)
    for id, text, reason in documents:
        found.add(id, text, Rejection("length", reason, f"{len(text)} characters"))
    return found


@given(TASKS)
def test_tasks_add_up_in_any_order_and_grouping(tasks: list[list[tuple[str, str, str]]]) -> None:
    a, b, c = map(counted, tasks)
    whole = counted([document for task in tasks for document in task])
    assert (a + b) + c == a + (b + c) == c + b + a == whole
    assert whole.total == sum(map(len, tasks))
    assert a == counted(tasks[0])  # adding changed neither
    assert Rejections.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_samples_are_those_of_the_smallest_hash_and_begin_the_text() -> None:
    found = Rejections(limit=2)
    for k in range(50):
        found.add(f"id {k}", f"{k} " + "x" * 400, Rejection("length", "long", f"{k} > 1"))
    (samples,) = found.samples.values()
    assert [len(one.text) for one in samples] == [300, 300]
    assert found.counts == {("length", "long"): 50}
    best = min(Rejections.from_json(found.to_json()).samples[("length", "long")])
    assert best == samples[0]
    assert best.text.startswith(best.id.removeprefix("id "))
    assert best.figures == f"{best.id.removeprefix('id ')} > 1"
    kept = Rejections(limit=0)
    kept.add("id", "text", Rejection("length", "long"))
    assert kept.samples == {}
    assert kept.total == 1
