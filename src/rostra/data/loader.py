"""From shards to batches: every sample a pure function of seed, manifest and position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rostra.batch import Batch
from rostra.config.data import DataSection
from rostra.config.sources import ExampleSource
from rostra.data.epochs import Source, joined
from rostra.data.local_cache import LocalCache
from rostra.data.mixture import Mixture
from rostra.data.packing import Packed
from rostra.data.permutation import derive
from rostra.data.prepared import Prepared
from rostra.data.samples import Samples
from rostra.data.shards import Shards
from rostra.errors import RequestError
from rostra.files import is_url

Ints = NDArray[np.int64]

PLANNED = 1024  # positions


@dataclass(frozen=True)
class Position:
    """What stands at a position of the training: for logs, and for finding a bad document."""

    epoch: int  # of its source
    sample: int  # its number g in the epoch's order
    index: int  # its place in the run of tokens, in samples; among rows of examples
    documents: tuple[str, ...]  # ids, in order; of examples, too
    source: int = 0  # among those that are mixed


class Loader:
    """Samples in the order of training. It has no state: a position is asked for, and a
    position is the number of samples since training began, over all epochs and sources."""

    def __init__(
        self,
        sources: Samples | Packed | Sequence[Source],
        global_batch_size: int,
        mixture: Mixture | None = None,
    ) -> None:
        """
        Args:
            mixture: of several sources, says which stands where.
        """
        one = isinstance(sources, Samples | Packed)
        self.sources = (Source(sources),) if one else tuple(sources)  # type: ignore[arg-type]
        self.global_batch_size = global_batch_size
        self.mixture = mixture or Mixture([1.0], [None], 0)

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions [first, first + count); a batch may cross epochs."""
        plan = self._planned(first, count)
        kinds = plan[:, :2]
        if (kinds == kinds[0]).all():
            source, variant = kinds[0].tolist()
            return self.sources[source].variants[variant].batch(plan[:, 2])
        found, kind = np.unique(kinds, axis=0, return_inverse=True)
        here = [np.flatnonzero(kind == number) for number in range(len(found))]
        parts = [
            self.sources[source].variants[variant].batch(plan[rows, 2])
            for (source, variant), rows in zip(found.tolist(), here, strict=True)
        ]
        return joined(parts, np.concatenate(here))

    def _planned(self, first: int, count: int) -> Ints:
        """Of these positions the source, its variant, and the index there: [positions, 3]."""
        if first < self.mixture.start:
            raise IndexError(f"there is no sample at position {first}")
        blocks = range(first // PLANNED, (first + count - 1) // PLANNED + 1)
        plan = np.concatenate([self._plan(block) for block in blocks])[first % PLANNED :]
        if len(plan) < count:
            raise IndexError(f"there is no sample at position {first + len(plan)}")
        return plan[:count]

    @cached_property
    def _plan(self) -> Callable[[int], Ints]:
        """The plan of a block of `PLANNED` positions: made at once, which costs no more than
        that of a batch."""
        return lru_cache(8)(self._make_plan)

    def _make_plan(self, block: int) -> Ints:
        first = block * PLANNED
        start, end = self.mixture.start, self.mixture.end
        skipped = min(PLANNED, max(0, start - first))  # of before a resume: never asked for
        count = PLANNED if end is None else max(0, min(PLANNED, end - first))
        plan = np.zeros((count, 3), dtype=np.int64)
        which, numbers = self.mixture.at(first + skipped, max(0, count - skipped))
        plan[skipped:, 0] = which
        for source in np.unique(which).tolist():
            here = np.flatnonzero(which == source)
            plan[skipped + here, 1:] = self.sources[source].places(numbers[here])
        return plan

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_plan"}

    def locate(self, position: int) -> Position:
        """What is trained on at a position."""
        which, numbers = self.mixture.at(position, 1)
        source = self.sources[int(which[0])]
        epoch, number = source.find(int(numbers[0]))
        samples = source.variants[epoch % len(source.variants)]
        index = samples.order(epoch)(number)
        return Position(epoch, number, index, samples.document_ids(index), int(which[0]))

    @property
    def sample_tokens(self) -> float:
        """Tokens of a sample, on average over the mixture; padding is none."""
        weights = np.array(self.mixture.weights) / sum(self.mixture.weights)
        each = [source.sample_tokens for source in self.sources]
        return float(np.dot(weights, each))

    def steps(self, epochs: float) -> int:
        """Optimizer steps that cover as many samples as so many epochs of all sources have, the
        last one perhaps going beyond; of sources that end, as many as they are enough for."""
        samples = sum(source.samples(epochs) for source in self.sources)
        steps = max(1, math.ceil(samples / self.global_batch_size))
        return steps if self.mixture.end is None else max(1, min(steps, self._enough))

    @property
    def _enough(self) -> int:
        assert self.mixture.end is not None
        return self.mixture.end // self.global_batch_size

    def check(self, steps: int) -> None:
        """Raises RequestError when the sources end before so many steps."""
        if self.mixture.end is not None and steps > self._enough:
            raise RequestError(
                f"data.sources: with their `epochs` the sources have {self.mixture.end:,} samples, "
                f"enough for {self._enough:,} steps, and {steps:,} are asked for. Lower "
                "train.steps, or let one source go on without `epochs`."
            )

    def state(self, position: int) -> dict[str, Any] | None:
        """What a checkpoint at a position keeps of a mixture; None where nothing is mixed."""
        return None if len(self.sources) == 1 else self.mixture.state(position)

    def resume(self, state: dict[str, Any] | None, position: int) -> None:
        """Go on at a position as a checkpoint's state says, with the weights there are now.

        Raises:
            RequestError: when sources were mixed before and are not now, or the reverse.
        """
        if (state is None) != (len(self.sources) == 1):
            before, now = ("none", "one") if state is None else ("one", "none")
            raise RequestError(
                f"data.sources: every source had {before} of `weight` when this run was started, "
                f"and has {now} now. Weights may change, but not come or go: restore them."
            )
        if state is not None:
            self.mixture = self.mixture.resume(state, position)
            self.__dict__.pop("_plan", None)


def training_loader(
    prepared: Prepared,
    data: DataSection,
    seed: int,
    global_batch_size: int,
    full_rows: bool,
    virtual_tokens: int,
    notice: Callable[[str], None],
) -> Loader:
    """What to train on, as `data` asks for it: all sources as one, or mixed by weight. See
    `Packed` for `full_rows` and `virtual_tokens`.

    Raises:
        RequestError: when nothing is left to train on, or long examples are to fail.
    """
    options = (global_batch_size, full_rows, virtual_tokens, notice)
    if not data.weighted:
        samples = training_samples(prepared, data, seed, *options)
        more = (_samples(prepared, run, data, seed, *options) for run in prepared.variants[1:])
        return Loader([Source(samples, *more)], global_batch_size)
    sources = []
    for index, source in enumerate(data.sources):
        own = derive(seed, "source", index) if len(data.sources) > 1 else seed
        # A document is no example that may be too long: it is cut, and nothing of it left out.
        example = isinstance(source, ExampleSource)
        each = data if example else data.model_copy(update={"long_examples": "split"})
        runs = [run.of_source(index) for run in prepared.variants]
        variants = Source(*(_samples(prepared, run, each, own, *options) for run in runs))
        if source.weight and not len(variants):
            raise RequestError(
                f"data.sources.{index}: its {runs[0].tokens:,} training tokens make no sample of "
                f"data.sequence_length ({data.sequence_length}). Add to it, "
                + ("see data.long_examples, " if example else "")
                + "or set its weight to 0."
            )
        sources.append(variants)
    weights = [source.weight or 0.0 for source in data.sources]
    limits = [
        None if source.epochs is None else samples.samples(source.epochs)
        for source, samples in zip(data.sources, sources, strict=True)
    ]
    return Loader(sources, global_batch_size, Mixture(weights, limits, seed))


def training_samples(
    prepared: Prepared,
    data: DataSection,
    seed: int,
    global_batch_size: int,
    full_rows: bool,
    virtual_tokens: int,
    notice: Callable[[str], None],
) -> Samples | Packed:
    """The samples of all sources as one, whatever their weights.

    Raises:
        RequestError: when nothing is left to train on, or long examples are to fail.
    """
    options = (global_batch_size, full_rows, virtual_tokens, notice)
    samples = _samples(prepared, prepared.train, data, seed, *options)
    if not len(samples):
        if not data.examples:
            raise RequestError(
                f"data.sources: {prepared.train.tokens:,} training tokens make no sample of "
                f"data.sequence_length ({data.sequence_length}); add text, or lower it"
            )
        raise RequestError(
            f"no example has a target within data.sequence_length ({data.sequence_length}) "
            "tokens: raise it, or set data.long_examples: split"
        )
    return samples


def _samples(
    prepared: Prepared,
    shards: Shards,
    data: DataSection,
    seed: int,
    global_batch_size: int,
    full_rows: bool,
    virtual_tokens: int,
    notice: Callable[[str], None],
) -> Samples | Packed:
    if data.packed == "concatenate":
        return Samples(shards, data.sequence_length, seed, data.isolate_documents, data.load)
    return _packed(
        prepared,
        shards,
        data,
        seed=seed,
        group=global_batch_size if data.group_by_length else None,
        full_rows=full_rows,
        virtual_tokens=virtual_tokens,
        notice=notice if data.examples else lambda _: None,  # documents are split in silence
    )


def held_out_samples(
    prepared: Prepared, data: DataSection, full_rows: bool, virtual_tokens: int = 0
) -> Packed:
    """The held-out examples as samples, cut and packed like those that are trained on; there
    may be none."""
    rows = {"full_rows": full_rows, "virtual_tokens": virtual_tokens}
    return _packed(prepared, prepared.held_out, data, seed=0, **rows)


def _packed(prepared: Prepared, shards: Shards, data: DataSection, **options: Any) -> Packed:
    tokenizer = prepared.tokenizer
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    assert data.packed != "concatenate"
    return Packed(
        shards,
        data.sequence_length,
        packing=data.packed,
        long_examples=data.long_examples if data.examples else "split",
        overlap=data.chunk_overlap,
        pad=next(token for token in pads if token is not None),
        load=data.load,
        folder=_rows_folder(prepared, data),
        **options,
    )


def _rows_folder(prepared: Prepared, data: DataSection) -> Path:
    """Where the rows of packed samples are kept: beside the shards, or beside their cache."""
    if is_url(str(prepared.folder)):
        return LocalCache.of(data.load).folder.with_name("rows") / prepared.key[:24]
    return Path(prepared.folder)
