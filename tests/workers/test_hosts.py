"""Slurm's host lists."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rostra.errors import RequestError
from rostra.workers.hosts import expand_counts, expand_hosts

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,6}[a-z]", fullmatch=True)
RANGES = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,2],login", ["gpu08", "gpu09", "gpu10", "gpu2", "login"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        ("a,b,c[5]", ["a", "b", "c5"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_known_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@given(st.lists(st.one_of(NAMES.map(lambda n: (n, None)), st.tuples(NAMES, RANGES)), min_size=1))
def test_short_forms_give_back_the_hosts(
    names: list[tuple[str, list[tuple[int, int, int]] | None]],
) -> None:
    """A list written from hosts, with ranges and padding, expands to those hosts."""
    hosts, short = [], []
    for name, ranges in names:
        if ranges is None:
            hosts.append(name)
            short.append(name)
            continue
        parts = []
        for first, more, width in ranges:
            parts.append(f"{first:0{width}}" + (f"-{first + more:0{width}}" if more else ""))
            length = len(f"{first:0{width}}")
            hosts += [f"{name}{n:0{length}}" for n in range(first, first + more + 1)]
        short.append(f"{name}[{','.join(parts)}]")
    assert expand_hosts(",".join(short)) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n[3-1]", "n[a-b]", "n[]", "n1,,n2", "n]1["])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="MASTER_ADDR"):
        expand_hosts(text)


@given(st.text(alphabet="n1-,[]0", max_size=12))
def test_any_text_gives_hosts_or_a_message(text: str) -> None:
    with contextlib.suppress(RequestError):
        assert all(expand_hosts(text))


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(RequestError):
        expand_counts("2(y3)")
