"""Memory at every place of a step, and how it grows with what a step repeats.

A place is where a step is: the forward or backward pass of a layer, counted from the front or
from the back, for the first or last micro batches, or what comes after. Between two steps that
differ in the number of layers (or micro batches) alone, the bytes at a place grow by the same
for each layer that is added, so two small steps tell of all larger ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rostra.dry_run import Watch
from rostra.parallel.engine import MeshEngine
from rostra.parallel.pipeline_split import own_layers
from rostra.plan.results import KINDS

Bytes = dict[str, int]  # by kind
Mark = tuple[str, int, int]  # what is done, the stage of the rank, the layer in it
Place = tuple[str, int, tuple[str, int], tuple[str, int]]
Profile = dict[Place, Bytes]  # the most at each place


class Marks:
    """Notes in what a `watch` sees where the step of an `engine` is."""

    def __init__(self, engine: MeshEngine, watch: Watch) -> None:
        self.watch = watch
        self.marks: list[tuple[int, Mark]] = []
        self.depths: list[int] = []
        for number, stage in enumerate(engine.stages):
            layers = own_layers(stage.model)
            self.depths.append(len(layers))
            for index, layer in enumerate(layers):
                layer.register_forward_pre_hook(self._begins(("forward", number, index)))
                layer.register_forward_hook(self._ends(number, index, index == len(layers) - 1))

    def note(self, what: str, stage: int = 0, layer: int = 0) -> None:
        self.marks.append((len(self.watch.changes), (what, stage, layer)))

    def _begins(self, mark: Mark) -> Callable[..., None]:
        return lambda *_: self.note(*mark)

    def _ends(self, stage: int, layer: int, last: bool) -> Callable[[nn.Module, Any, Any], None]:
        def ends(_: nn.Module, args: Any, output: Any) -> None:
            if last:
                self.note("after the layers", stage)
            found = next(x for x in tree_leaves(output) if isinstance(x, Tensor))
            if found.requires_grad:
                found.register_hook(lambda _: self.note("backward", stage, layer))

        return ends

    def spans(self, begun: int) -> Iterator[tuple[list[Place], int, int]]:
        """Of the changes from `begun` on: those between two marks, by all names of the place."""
        marks = [(begun, ("begin", 0, 0)), *(m for m in self.marks if m[0] >= begun)]
        times = Counter(mark for _, mark in marks)
        seen: Counter[Mark] = Counter()
        ends = [*marks[1:], (len(self.watch.changes), ("end", 0, 0))]
        for (start, mark), (stop, _) in zip(marks, ends, strict=True):
            what, stage, layer = mark
            depth = self.depths[stage] if what in ("forward", "backward") else 1
            count = seen[mark]
            seen[mark] += 1
            places = product(_sides(layer, depth), _sides(count, times[mark]))
            yield [(what, stage, *place) for place in places], start, stop


def _sides(index: int, size: int) -> list[tuple[str, int]]:
    """Where `index` is, from either end; the far end itself is not counted from the other."""
    found = []
    if index < size - 1 or size == 1:
        found.append(("front", index))
    if index > 0 or size == 1:
        found.append(("back", size - 1 - index))
    return found


def profile(marks: Marks, begun: int, kind_of: dict[int, str], all_live: bool) -> Profile:
    """The most bytes at every place since `begun`.

    `kind_of` has the kinds of blocks that last. Other blocks from before `begun` count where
    `all_live`, as buffers of communication.
    """
    changes, roles = marks.watch.changes, marks.watch.roles
    now, there = dict.fromkeys(KINDS, 0), Counter[int]()
    for number, size in changes[:begun]:
        if number in kind_of:
            now[kind_of[number]] += size
        else:
            there[number] += size
    if all_live:
        now["communication"] += sum(there.values())
    found: Profile = {}
    head = False
    for names, start, stop in marks.spans(begun):
        head = names[0][0] == "after the layers"
        highest, most = sum(now.values()), dict(now)
        for number, size in changes[start:stop]:
            if size > 0 and number not in kind_of:
                kind_of[number] = roles.get(number, "logits" if head else "activations")
            if size < 0 and there[number] > 0:
                there[number] += size
                if all_live:
                    now["communication"] += size
                continue
            now[kind_of.get(number, "activations")] += size
            if (total := sum(now.values())) > highest:
                highest, most = total, dict(now)
        found |= dict.fromkeys(names, most)
    return found


def extended(one: Profile, two: Profile, times: float) -> Profile:
    """`one` with `times` the growth from it to `two`, at the places that both have."""
    return {
        place: {k: round(size + times * (two[place][k] - size)) for k, size in one[place].items()}
        for place in one
        if place in two
    }


def peak(found: Profile) -> Bytes:
    """Bytes by kind at the place where they are most."""
    return max(found.values(), key=lambda kinds: sum(kinds.values()))
