"""Training straight from raw sources: tokenized on the way, nothing prepared.

Position p is sample p // G of lane p % G, G being the global batch size. A lane is a stream of
its own, which no other lane and no number of ranks has any influence on: each rank makes the
samples of its rows, and all ranks together the same samples, however many they are. What a
checkpoint keeps of a lane is a cursor, from which another process goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rostra.batch import IGNORE, Batch
from rostra.config.data import DataSection
from rostra.data.clean import Rejections
from rostra.data.documents import Documents, Losses
from rostra.data.folders import LocalFolder
from rostra.data.formats import TokensReader
from rostra.data.lanes import Cursors, Lane, Turns
from rostra.data.loader import Position
from rostra.data.permutation import derive
from rostra.data.prepared import Prepared
from rostra.data.reading import make_reader
from rostra.data.sources import BadRecords, Reader
from rostra.data.streams import Cursor, Raw, Stream, Tape, list_parts
from rostra.data.tokenizer import Encoder
from rostra.errors import RequestError

KEPT = 64  # samples of a lane to which one can go back without reading it from its start
READERS = 16  # threads that read: on a store each takes its time


class StreamLoader:
    """Samples in the order of training, from streams: the face of a `Loader`, with cursors.

    It is made for being asked in order. A position that was asked for before is answered from
    the last cursors that are kept, and one further on after all that is between.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        data: DataSection,
        encoder: Encoder,
        seed: int,
        global_batch_size: int,
        notice: Callable[[str], None],
        losses: Losses,
    ) -> None:
        """`streams` are one of all sources, or one of each where they have weights."""
        self.sources = tuple(streams)
        self.global_batch_size = global_batch_size
        self._data, self._encoder = data, encoder
        self._losses, self._notice = losses, notice
        self._said: deque[str] = deque()  # by other threads, to be handed on by the one that asks
        losses.bad.notice = self._said.append
        self._documents = Documents(data, LocalFolder(Path()), stored=False)
        weights = [source.weight or 0.0 for source in data.sources] if data.weighted else [1.0]
        self._turns = Turns(weights, global_batch_size, seed)
        self._seen = np.zeros(len(weights), np.int64)  # samples of each source,
        self._counted = 0  # in so many of each lane
        start = (Cursor(),) * len(streams)
        self._base = 0, [start] * global_batch_size  # the sample and cursors where lanes begin
        self._lanes: dict[int, Lane] = {}
        self._trained = 0  # samples of each lane
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(READERS, "rostra-stream")

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions [first, first + count)."""
        tokens = np.empty((count, self._length + 1), np.int64)
        begins = np.zeros(tokens.shape, np.bool_)
        row = 0
        with self._lock:
            while row < count:
                sample, lane = divmod(first + row, self.global_batch_size)
                stop = min(self.global_batch_size, lane + count - row)
                lanes = self._at(sample, range(lane, stop))
                for tape in self._next(lanes):
                    tape.look(tokens[row], begins[row])
                    row += 1
                self._advance(lanes)
        return _samples(tokens, begins, self._data.isolate_documents)

    def locate(self, position: int) -> Position:
        """What is trained on at a position."""
        sample, number = divmod(position, self.global_batch_size)
        with self._lock:
            lanes = self._at(sample, range(number, number + 1))
            (tape,) = self._next(lanes)
            tokens = np.empty(self._length, np.int64)
            ids = tape.look(tokens, np.zeros(self._length, np.bool_))
            element = number + tape.cursor.element * self.global_batch_size
            source = lanes[0].tapes.index(tape)
        epoch, index = divmod(element, tape.stream.size)
        return Position(epoch, sample, index, tuple(ids), source)

    @property
    def sample_tokens(self) -> float:
        """Tokens of a sample."""
        return float(self._length)

    def steps(self, epochs: float) -> int:
        """Raises RequestError: how long an epoch is shows when it ends."""
        raise RequestError(
            "train.epochs: nobody knows the length of sources that are streamed "
            "(data.streaming). Set train.steps or train.tokens."
        )

    def check(self, steps: int) -> None:
        """A stream never ends."""

    def state(self, position: int) -> dict[str, Any] | None:
        """Of sources by weight, the samples `seen` of each before a position; positions may
        only grow. Cursors from long before are let go, and what was skipped is said."""
        self._trained = sample = position // self.global_batch_size
        while self._said:
            self._notice(self._said.popleft())
        if not self._data.weighted:
            return None
        for number in range(self._counted, sample):
            self._seen += np.bincount(self._turns.at(number), minlength=len(self._seen))
        self._counted = sample
        return {"seen": self._seen.tolist()}

    def cursors(self, position: int) -> dict[int, Cursors]:
        """Where the lanes that this process has made stand at the beginning of a step."""
        sample = position // self.global_batch_size
        with self._lock:
            self._at(sample, [n for n, lane in self._lanes.items() if lane.next < sample])
            made = {
                number: lane.cursors if lane.next == sample else lane.kept[sample]
                for number, lane in self._lanes.items()
            }
            return dict(enumerate(self._base[1])) | made if sample == self._base[0] else made

    def resume(
        self, state: dict[str, Any] | None, lanes: list[list[list[int]]] | None, position: int
    ) -> None:
        """Go on at a position with the states and the cursors of a checkpoint.

        Raises:
            RequestError: when the run that it is of did not stream, or mixed other sources.
        """
        if lanes is None or (state is None) == self._data.weighted:
            raise RequestError(
                "data.streaming: this run was started from prepared data, or without (or with) a "
                "`weight` for every source. Restore that, or start a new run."
            )
        sample = position // self.global_batch_size
        self._base = sample, [tuple(Cursor(*each) for each in lane) for lane in lanes]
        self._seen[:] = 0 if state is None else state["seen"]
        self._counted = sample
        self._lanes.clear()

    @property
    def _length(self) -> int:
        return self._data.sequence_length

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            sample, cursors = self._base[0], self._base[1][number]
            pairs = zip(self.sources, cursors, strict=True)
            tapes = [Tape(stream, number, cursor, self._losses.bad) for stream, cursor in pairs]
            self._lanes[number] = Lane(tapes, sample)
        return self._lanes[number]

    def _at(self, sample: int, numbers: Iterable[int]) -> list[Lane]:
        """The lanes with these numbers, each with this sample as its next."""
        lanes = [self._lane(number) for number in numbers]
        for lane in lanes:
            lane.seek(sample)
        while behind := [lane for lane in lanes if lane.next < sample]:
            self._next(behind)
            self._advance(behind)
        return lanes

    def _next(self, lanes: list[Lane]) -> list[Tape]:
        """The tape that has each lane's next sample, with the tokens of it at hand."""
        tapes = [lane.tapes[self._source(lane)] for lane in lanes]
        while short := [tape for tape in tapes if tape.lacks(self._length + 1)]:
            try:
                self._fill(short)
            except BaseException:
                for tape in short:  # what was read and did not come back is read again
                    tape.restart(tape.cursor)
                raise
        return tapes

    def _source(self, lane: Lane) -> int:
        return self._turns.one(lane.next, lane.tapes[0].lane) if len(lane.tapes) > 1 else 0

    def _advance(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            lane.kept[lane.next] = lane.cursors
            lane.tapes[self._source(lane)].advance(self._length)
            lane.next += 1
            if lane.next % KEPT == 0:
                lane.forget(self._trained - KEPT)

    def _fill(self, tapes: list[Tape]) -> None:
        """Read and tokenize more for each of these."""
        reading = [self._threads.submit(tape.read) for tape in tapes]
        wait(reading)  # also for those beside one that fails, as they may all be restarted
        found = [future.result() for future in reading]
        kept = [[(raw, self._content(raw)) for raw in raws] for raws in found]
        texts = [text for each in kept for _, text in each if isinstance(text, str)]
        encoded = iter(self._encoder.encode(texts))
        for tape, each in zip(tapes, kept, strict=True):
            for raw, content in each:
                if content is not None:
                    tape.add(raw, next(encoded) if isinstance(content, str) else content)

    def _content(self, raw: Raw) -> str | NDArray[Any] | None:
        """What of a document is trained on, as text or tokens; None if nothing is."""
        item = self._documents.clean(raw.item, self._losses.rejections)
        if item is None or item.split(self._data.held_out) == "held_out":
            return None
        if item.tokens is None:
            return raw.stripe.share(item.text) or None
        highest, size = int(item.tokens.max(initial=0)), self._encoder.vocabulary_size
        if highest >= size:
            raise RequestError(
                f"{raw.stripe.reader.key}: document {item.id} holds token {highest}; the "
                f"vocabulary has 0 to {size - 1}. Name the tokenizer that it was made with "
                "(data.tokenizer.pretrained)."
            )
        return item.tokens


def _samples(tokens: NDArray[np.int64], begins: NDArray[np.bool_], isolate: bool) -> Batch:
    """Samples of runs of tokens, each with one more than it has positions; in `begins`, where
    documents do. As `Samples` has them."""
    labels = tokens[:, 1:].copy()
    positions = np.tile(np.arange(labels.shape[1]), (len(labels), 1))
    if isolate:
        labels[begins[:, 1:]] = IGNORE
        starts = np.where(begins[:, :-1], positions, 0)
        positions = positions - np.maximum.accumulate(starts, axis=1)
    inputs = np.ascontiguousarray(tokens[:, :-1])
    return Batch(*map(torch.from_numpy, (inputs, labels, positions)))


def streaming_loader(
    prepared: Prepared,
    data: DataSection,
    seed: int,
    global_batch_size: int,
    notice: Callable[[str], None],
) -> StreamLoader:
    """What to train on, straight from the sources of `data`.

    Args:
        prepared: has the tokenizer; what it holds out is not trained on here either.

    Raises:
        RequestError: when there is nothing to read.
    """
    losses = Losses(BadRecords(data.on_bad_record, notice), Rejections())
    streams = open_streams(data, seed, global_batch_size, losses.bad, prepared.tokenizer_hash)
    encoder = Encoder(prepared.tokenizer)
    return StreamLoader(streams, data, encoder, seed, global_batch_size, notice, losses)


def open_streams(
    data: DataSection, seed: int, lanes: int, bad: BadRecords, tokenizer: str | None = None
) -> list[Stream]:
    """One stream of all sources, or one of each where they have weights.

    Args:
        tokenizer: the hash of the one in use.

    Raises:
        RequestError: when there is nothing to read, or tokens are of another tokenizer.
    """
    piles = []
    for index, source in enumerate(data.sources):
        reader = make_reader(source, index)
        assert isinstance(reader, Reader)  # the config has refused examples
        if isinstance(reader, TokensReader):
            reader.check_tokenizer(tokenizer)
        piles.append((reader, list_parts(reader, lanes, bad)))
    groups = [[pile] for pile in piles] if data.weighted else [piles]
    seeds = [derive(seed, "stream", index) for index in range(len(groups))]
    return [Stream(group, lanes, own) for group, own in zip(groups, seeds, strict=True)]
