"""Raw sources as endless streams: which text comes next, and how to go on from a few integers.

The parts of the sources are cut into stripes, so many that the lanes (the rows of a global batch)
never share one. Their endless sequence, epoch after epoch in another order, is dealt out to the
lanes like cards.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rostra.data.gutenberg import GutenbergReader
from rostra.data.items import Item, token_items
from rostra.data.permutation import Permutation
from rostra.data.readers.jsonl import JsonlReader
from rostra.data.readers.tables import ParquetReader
from rostra.data.readers.text import TextReader
from rostra.data.sources import BadRecords, Part, Reader
from rostra.errors import RequestError

STRIPES = 4  # for each lane, at least
RANGE_BYTES = 1 << 20  # of a file in lines: what is read again, at the most, to go on in it
SMALLEST_RANGE = 1 << 14
MOST_RANGES = 1 << 18  # of a source: larger ones are read in larger ranges
READ_BYTES = 1 << 16  # of text, by a lane at once,
READ_STRIPES = 16  # or of as many stripes
WHOLE_BYTES = 2 << 20  # parts up to this size are read in one go, so that none stays open
PATIENCE = 16  # times all stripes, after which a lane without a document gives up


class Cursor(NamedTuple):
    """Where a lane stands in a stream: the token that comes next."""

    element: int = 0  # of the lane's sequence of stripes
    document: int = 0  # its number in the part
    token: int = 0  # of what the stripe has of the document


@dataclass(frozen=True)
class Stripe:
    """The share of a part that one lane reads: of its documents each `of`-th, from `index` on;
    of a file that is one document, that segment of it."""

    reader: Reader
    part: Part
    index: int
    of: int

    @property
    def segmented(self) -> bool:
        return isinstance(self.reader, TextReader | GutenbergReader)

    def documents(self, first: int, bad: BadRecords) -> Iterator[tuple[int, Item]]:
        """Its documents by number, from number `first` of the part on."""
        for number, found in enumerate(self._all(bad)):
            if number >= first and (self.segmented or number % self.of == self.index):
                yield number, found if isinstance(found, Item) else Item.of(*found)

    def _all(self, bad: BadRecords) -> Iterator[Item | tuple[str, str, str]]:
        if self.reader.tokens:
            for batch in self.reader.read(self.part, bad):
                yield from token_items(batch)
            return
        for found in self.reader.documents(self.part, bad):
            yield found.id, found.text, json.dumps(found.metadata, default=str)

    def share(self, text: str) -> str:
        """What it has of a document's text: all, or the segment, cut between words."""
        if not self.segmented or self.of == 1:
            return text
        start, stop = (
            _border(text, len(text) * k // self.of) for k in (self.index, self.index + 1)
        )
        return text[start:stop]


def _border(text: str, place: int) -> int:
    found = text.find(" ", place) if place else 0
    return len(text) if found < 0 else found


class Stream:
    """Stripes of some sources, without an end: epoch after epoch, each in an order of its own."""

    def __init__(self, piles: Iterable[tuple[Reader, list[Part]]], lanes: int, seed: int) -> None:
        """`piles` are the parts of each reader.

        Raises:
            RequestError: when there are no parts.
        """
        self.piles, self.lanes, self.seed = tuple(piles), lanes, seed
        self._starts = np.cumsum([0, *(len(parts) for _, parts in self.piles)])
        self._parts = int(self._starts[-1])
        if not self._parts:
            raise RequestError("data.sources: there is nothing to read. Add files to the sources.")
        self.of = -(-STRIPES * lanes // self._parts)
        self.size = self._parts * self.of
        self.furthest = 0  # element of the sequence that was begun

    def stripe(self, element: int) -> Stripe:
        """That of the sequence of all lanes."""
        self.furthest = max(self.furthest, element)
        epoch, place = divmod(element, self.size)
        index, number = divmod(Permutation(self.seed, epoch, self.size)(place), self._parts)
        pile = int(np.searchsorted(self._starts, number, "right")) - 1
        reader, parts = self.piles[pile]
        return Stripe(reader, parts[number - int(self._starts[pile])], index, self.of)

    def epochs(self, samples: int) -> float:
        """How often it was seen, about: how far this process has begun to read it, as nobody
        knows how many samples an epoch has."""
        return self.furthest / self.size


def list_parts(reader: Reader, lanes: int, bad: BadRecords) -> list[Part]:
    """The parts of a source, in ranges small enough that there are some for each lane."""
    if not isinstance(reader, JsonlReader | ParquetReader):
        return reader.parts(bad)
    parts = replace(reader, range_bytes=RANGE_BYTES).parts(bad)
    size = sum(part.size for part in parts)
    fine = max(SMALLEST_RANGE, min(RANGE_BYTES, size // (2 * STRIPES * lanes)))
    wanted = max(fine, size // MOST_RANGES)
    if wanted == RANGE_BYTES or (wanted < RANGE_BYTES and len(parts) >= STRIPES * lanes):
        return parts
    return replace(reader, range_bytes=wanted).parts(BadRecords("skip", lambda _: None))


class Raw(NamedTuple):
    """A document as it was read for a lane."""

    element: int
    number: int
    stripe: Stripe
    item: Item


class Tokens(NamedTuple):
    """A document in tokens."""

    element: int
    number: int
    id: str
    tokens: NDArray[Any]


class Tape:
    """The endless run of tokens that one lane has of a stream, from a cursor on.

    What is read is handed out as text and comes back in tokens, so that the text of many lanes
    can be tokenized at once.
    """

    def __init__(self, stream: Stream, lane: int, cursor: Cursor, bad: BadRecords) -> None:
        self.stream, self.lane = stream, lane
        self._bad = bad
        self.restart(cursor)

    def restart(self, cursor: Cursor) -> None:
        """Go on from a cursor; what was read is let go."""
        self._from = cursor
        self._queue: deque[Tokens] = deque()
        self._held = 0  # tokens in the queue
        self._passed = cursor.token  # of the first document there
        self._barren = 0  # stripes since the last document
        self._raw = self._read(cursor)

    @property
    def cursor(self) -> Cursor:
        if not self._queue:
            return self._from
        return Cursor(self._queue[0].element, self._queue[0].number, self._passed)

    def lacks(self, count: int) -> bool:
        """Whether there are fewer tokens at hand."""
        return self._held - self._passed < count

    def read(self) -> list[Raw]:
        """The next documents: about `READ_BYTES`, or what `READ_STRIPES` have; one at least."""
        found: list[Raw] = []
        size, stop = 0, self._barren + READ_STRIPES
        while not found or (size < READ_BYTES and self._barren < stop):
            found.append(raw := next(self._raw))
            size += raw.item.size
        return found

    def _read(self, cursor: Cursor) -> Iterator[Raw]:
        for element in itertools.count(cursor.element):
            self._barren += 1
            if self._barren > PATIENCE * self.stream.size:
                raise RequestError(
                    "data.sources: nothing is left to train on: every document is bad, rejected, "
                    "or held out. Loosen data.clean, or lower data.held_out."
                )
            stripe = self.stream.stripe(self.lane + element * self.stream.lanes)
            first = cursor.document if element == cursor.element else 0
            documents: Iterable[tuple[int, Item]] = stripe.documents(first, self._bad)
            if stripe.part.size <= WHOLE_BYTES:
                documents = list(documents)
            for number, item in documents:
                yield Raw(element, number, stripe, item)

    def add(self, raw: Raw, tokens: NDArray[Any]) -> None:
        """A document that was read, in tokens; in the order in which they were."""
        if not len(tokens):
            return
        self._barren = 0
        if not self._queue and (raw.element, raw.number) != self._from[:2]:
            self._passed = 0
        self._queue.append(Tokens(raw.element, raw.number, raw.item.id, tokens))
        self._held += len(tokens)

    def look(self, tokens: NDArray[np.int64], begins: NDArray[np.bool_]) -> list[str]:
        """Fill in the next tokens, and where among them documents begin; the ids of these."""
        at, passed, ids = 0, self._passed, []
        for document in self._queue:
            taken = document.tokens[passed : passed + len(tokens) - at]
            tokens[at : at + len(taken)] = taken
            begins[at] = passed == 0
            ids.append(document.id)
            at, passed = at + len(taken), 0
            if at == len(tokens):
                break
        return ids

    def advance(self, count: int) -> None:
        """Let go of the next tokens; one more than these must be at hand."""
        self._passed += count
        while self._passed >= len(self._queue[0].tokens):
            gone = len(self._queue.popleft().tokens)
            self._passed -= gone
            self._held -= gone
