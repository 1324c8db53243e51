"""Slurm's short form of many host names, `node[01-03,07],login`, and of many counts, `2(x3),1`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from rostra.errors import RequestError

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")  # the inside of brackets, or plain text
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts of a Slurm host list in its order; zeros that pad a number are kept.

    `n[1-2,7],m` is n1, n2, n7, m; several brackets in one name make every combination, the
    last changing first. Raises RequestError for what is not such a list.
    """
    hosts: list[str] = []
    for name in re.split(r",(?![^\[]*\])", text.strip()):  # commas outside of brackets
        pieces = list(_PIECE.finditer(name))
        if not pieces or "".join(piece[0] for piece in pieces) != name:
            raise _not_a_list(text)
        choices = [
            [piece[2]] if piece[1] is None else list(_numbers(piece[1], text)) for piece in pieces
        ]
        hosts += ["".join(parts) for parts in product(*choices)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """Tasks of each node from a list such as `2(x3),1`, which is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise RequestError(f"{text!r} is not a list of tasks per node such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise _not_a_list(text)
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise _not_a_list(text)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"


def _not_a_list(text: str) -> RequestError:
    return RequestError(
        f"{text!r} is not a Slurm host list such as node[01-03,07],login; set MASTER_ADDR to "
        "the host of rank 0 instead"
    )
