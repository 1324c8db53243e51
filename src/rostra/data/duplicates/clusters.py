"""Which documents are duplicates of one that stays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rostra.data.duplicates.words import Hashes

Places = NDArray[np.intp]


def duplicates(content: Hashes, names: Hashes, bands: Iterable[Hashes] = ()) -> NDArray[np.bool_]:
    """True for each document to drop: [documents].

    Documents with equal content, or with an equal word in any one band, belong together, and so
    do those that belong to a third. Of each such cluster the document with the smallest content
    hash stays, or among equal ones that with the smallest name: what stays depends on neither the
    order of the documents nor on how they are divided among files or machines.

    Args:
        content: the first 16 bytes of the text's SHA-256, as two words: [documents, 2].
        names: a hash of the source's name and the document's id: [documents].
        bands: of the MinHash signatures, one band after the other: [documents] each. One is held
            at a time.
    """
    ranked = _by_content(content, names)
    own = np.arange(len(ranked))
    rank = np.empty_like(own)
    rank[ranked] = own
    # Documents are known by their ranks from here on. Each points to one of its cluster with a
    # smaller rank, or to itself: the one that stays.
    smaller = own.copy()
    equal = (content[ranked[1:]] == content[ranked[:-1]]).all(axis=1)
    _join(smaller, own, np.r_[True, ~equal][: len(own)])
    for band in bands:
        order = np.argsort(band)
        _join(smaller, rank[order], _begins(band[order]))
    return (smaller != own)[rank]


def _by_content(content: Hashes, names: Hashes) -> Places:
    """The documents ordered by content, then name: [documents]."""
    order = np.argsort(content[:, 0])
    begins = _begins(content[order, 0])
    alone = begins & np.r_[begins[1:], True][: len(begins)]
    rows = order[~alone]  # few, as a rule: the slower sort is for them
    order[~alone] = rows[np.lexsort((names[rows], content[rows, 1], content[rows, 0]))]
    return order


def _begins(ordered: Hashes) -> NDArray[np.bool_]:
    """True where another value begins: [values]."""
    begins = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    return begins


def _join(smaller: Places, members: Places, begins: NDArray[np.bool_]) -> None:
    """Make one cluster of each run of `members`; a run begins where `begins` says so.

    All clusters that are joined point to the smallest of all in a few rounds: in each, every root
    that should be joined is put below a smaller one, and all then point to their new roots.
    """
    sizes = np.diff(np.flatnonzero(begins), append=len(members))
    members = members[np.repeat(sizes > 1, sizes)]
    sizes = sizes[sizes > 1]
    starts = np.cumsum(sizes) - sizes
    while len(members):
        roots = smaller[members]
        smallest = np.repeat(np.minimum.reduceat(roots, starts), sizes)
        if (roots == smallest).all():
            return
        np.minimum.at(smaller, roots, smallest)
        while ((further := smaller[smaller]) != smaller).any():
            smaller[:] = further
