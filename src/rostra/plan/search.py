"""The search over all layouts: the fastest, the cheapest, the fewest devices, and every trade
between time, devices and memory that is not worse than another in all of them.

Each layout is decided, so the result is exact under the models. Most are decided by calling
them. One fact spares calls without changing any result, and `tests/plan/test_search.py` holds it
against looking at all: parameters and optimizer states lie alike in all layouts of a block,
whatever their micro batches and checkpointing. Those of any rank are less than what the fullest
rank needs under any of them: where they alone do not fit, none does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rostra.layout import AXES, Layout
from rostra.plan.results import LASTING, Memory, Time
from rostra.plan.space import Block

Goal = Literal["fastest", "cheapest", "fewest"]
GOALS: tuple[Goal, ...] = ("fastest", "cheapest", "fewest")

_PLAIN = {f.name: f.default for f in fields(Layout)}


@dataclass(frozen=True)
class Room:
    """Memory for the ranks of a plan, in bytes."""

    device: int
    host: int = 0  # of a node
    nvme: int = 0  # of a node
    ranks_per_node: int = 1

    def host_of(self, ranks: int) -> int:
        """Bytes of the host's memory for each of so many ranks."""
        return self.host // min(ranks, self.ranks_per_node)

    def nvme_of(self, ranks: int) -> int:
        return self.nvme // min(ranks, self.ranks_per_node)

    def shortage(self, memory: Memory, ranks: int) -> int:
        """Bytes of a rank that have no room; 0 when all fits."""
        return (
            max(0, memory.peak - self.device)
            + max(0, memory.host_peak - self.host_of(ranks))
            + max(0, memory.nvme - self.nvme_of(ranks))
        )


@dataclass(frozen=True)
class Models:
    """What is foretold of the layouts of one config, and how much memory there is."""

    memory: Callable[[Layout], Memory]
    time: Callable[[Layout], Time]
    room: Room
    variant: int = 0  # which config, where several are searched
    techniques: int = 0  # that this config uses of those allowed


@dataclass(frozen=True)
class Entry:
    """A layout that fits, with what the search compares."""

    seconds: float  # of a step
    peak: int  # bytes on a device
    ranks: int
    layout: Layout
    variant: int
    parts: float = 0.0  # beside plain replicas, with the techniques; see `parts_of`

    def by(self, goal: Goal) -> tuple[float, float]:
        """What `goal` compares; smaller is better."""
        if goal == "fewest":
            return self.ranks, self.seconds
        price = self.seconds * self.ranks
        return (self.seconds, price) if goal == "fastest" else (price, self.seconds)

    def better(self, other: Entry) -> bool:
        """Whether it is faster; among equals, simpler."""
        if self.seconds != other.seconds:
            return self.seconds < other.seconds
        return simplicity(self.layout) < simplicity(other.layout)


@dataclass(frozen=True)
class Miss:
    """The layout of its kind that comes nearest to fitting."""

    shortage: int
    peak: int
    layout: Layout
    variant: int


@dataclass
class Found:
    """What a search has found."""

    considered: int = 0
    fitting: int = 0
    bests: dict[tuple[int, float], Entry] = field(default_factory=dict)  # by ranks, parts: fastest
    fronts: dict[int, list[Entry]] = field(default_factory=dict)  # by ranks: time against memory
    kinds: dict[tuple[Any, ...], Entry | Miss] = field(default_factory=dict)

    def best(self, goal: Goal) -> Entry | None:
        entries = self.bests.values()
        return min(entries, key=lambda x: (x.by(goal), simplicity(x.layout)), default=None)

    @property
    def front(self) -> list[Entry]:
        """Entries that no other beats or equals in time, price, devices and free memory all.
        The price is that of so many devices for so long."""
        kept: list[Entry] = []
        for ranks in sorted(self.fronts):
            for entry in self.fronts[ranks]:
                if not any(_beats(other, entry) for other in kept):
                    kept.append(entry)
        return kept

    def nearest(self) -> Miss | None:
        misses = [x for x in self.kinds.values() if isinstance(x, Miss)]
        return min(misses, key=lambda x: (x.shortage, simplicity(x.layout)), default=None)


def search(blocks: Iterable[Block], models: Models, found: Found | None = None) -> Found:
    """Decide every layout of `blocks`; adds to `found`, if given, what was found of others."""
    found = found or Found()
    for block in blocks:
        found.considered += len(block)
        kind = kind_of(next(_layouts(block)), models.variant)  # one for all of them
        for layout in _layouts(block):
            memory = models.memory(layout)
            if not (shortage := models.room.shortage(memory, layout.world_size)):
                _fit(layout, memory, kind, models, found)
                continue
            other = found.kinds.get(kind)
            if other is None or (isinstance(other, Miss) and shortage < other.shortage):
                found.kinds[kind] = Miss(shortage, memory.peak, layout, models.variant)
            if sum(memory.kinds.get(name, 0) for name in LASTING) > models.room.device:
                break
    return found


def _layouts(block: Block) -> Iterator[Layout]:
    for frame in block.frames:
        for micro_batch, accumulation in frame.micro_batches:
            yield frame.layout(micro_batch, accumulation)


def _fit(
    layout: Layout, memory: Memory, kind: tuple[Any, ...], models: Models, found: Found
) -> None:
    found.fitting += 1
    ranks, seconds = layout.world_size, models.time(layout).step
    parts = models.techniques + parts_of(layout)
    entry = Entry(seconds, memory.peak, ranks, layout, models.variant, parts)
    _add(found.fronts.setdefault(ranks, []), entry)
    if (best := found.bests.get((ranks, parts))) is None or entry.better(best):
        found.bests[ranks, parts] = entry
    other = found.kinds.get(kind)
    if not isinstance(other, Entry) or entry.better(other):
        found.kinds[kind] = entry


def _add(front: list[Entry], entry: Entry) -> None:
    """Keep `front` sorted by time with memory falling; of equals, it has the simplest."""
    place = bisect_left(front, entry.seconds, key=lambda x: x.seconds)
    if place and front[place - 1].peak <= entry.peak:
        return
    end = place
    while end < len(front) and front[end].peak >= entry.peak:
        end += 1
    if place < len(front) and front[place].seconds == entry.seconds:
        here = front[place]
        if here.peak < entry.peak or (here.peak == entry.peak and not entry.better(here)):
            return
    front[place:end] = [entry]


def _beats(one: Entry, other: Entry) -> bool:
    return (
        one.seconds <= other.seconds
        and one.seconds * one.ranks <= other.seconds * other.ranks
        and one.ranks <= other.ranks
        and one.peak <= other.peak
    )


def kind_of(layout: Layout, variant: int = 0) -> tuple[Any, ...]:
    """What a person would call the strategy: of each, a plan tells the best layout."""
    split = tuple(axis for axis in ("pipeline", "context", "tensor") if getattr(layout, axis) > 1)
    host = layout.offload_parameters != "none" or layout.offload_optimizer != "none"
    return variant, layout.engine, layout.sharding, split, host


def parts_of(layout: Layout) -> float:
    """What a layout has beside replicas of PyTorch's own: axes that split a sample or the model,
    two axes of data, a schedule other than 1F1B, another engine, and each thing that waits on
    the host or on disk. Sharding is half a part."""
    return (layout.sharding != "no_shard") / 2 + sum((
        layout.tensor > 1,
        layout.context > 1,
        layout.pipeline > 1,
        layout.sharding == "hybrid_shard",
        layout.pipeline_schedule not in ("none", "1f1b"),
        layout.engine != "torch",
        layout.offload_parameters != "none",
        layout.offload_optimizer != "none",
        layout.activation_checkpointing == "offload",
    ))  # fmt: skip


def simplicity(layout: Layout) -> tuple[Any, ...]:
    """Smaller is simpler: fewer axes, fewer settings, larger micro batches, then the plainer."""
    settings = [
        name for name, value in _PLAIN.items()
        if name not in (*AXES, "micro_batch", "accumulation") and getattr(layout, name) != value
    ]  # fmt: skip
    axes = [axis for axis in AXES if getattr(layout, axis) > 1]
    return len(axes), len(settings), layout.accumulation, str(layout)
