"""Memory through a step: what each thing that a rank does takes at the most, and what it leaves.

What a schedule has a rank do (the forward or backward pass of a micro batch through a stage, an
exchange) is an action. Actions of a kind take and leave the same, but for the first and the last
of a step, so few micro batches tell of many. Within an action, a place is the pass of a layer,
counted from the front or from the back: between models that differ in the number of layers
alone, bytes there grow by the same for each layer that is added, so two tell of all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rostra.dry_run import Watch
from rostra.parallel.engine import MeshEngine
from rostra.parallel.pipeline import SEVERAL
from rostra.parallel.pipeline_split import own_layers
from rostra.plan.results import KINDS

Bytes = dict[str, int]  # by kind
Action = tuple[str, int]  # what is done, and for which of the rank's stages
Place = tuple[str, str, int]  # what of a layer, counted from which end, and its number
AFTER = ("norm", "update")  # what a step does after its micro batches
_SCHEDULED = re.compile(r"PP:(\d+)([A-Z_]+?)\d*")  # so torch.distributed.pipelining calls them


@dataclass(frozen=True)
class Span:
    """An action: what was there before, the most above that at each place, what it left."""

    action: Action
    before: Bytes
    most: dict[Place, Bytes]
    left: Bytes


class Marks:
    """Notes in what a `watch` sees what a step of an `engine` does, and in which layer."""

    def __init__(self, engine: MeshEngine, watch: Watch) -> None:
        self.watch, self.ranks = watch, engine.layout.pipeline
        self.marks: list[tuple[int, Action | None, tuple[str, int]]] = []
        self.depths: list[int] = []
        self.last = [stage.last for stage in engine.stages]
        watch.hears = self._hear
        for number, stage in enumerate(engine.stages):
            if engine.layout.pipeline_schedule not in SEVERAL:  # these tell what they do
                stage.register_forward_pre_hook(
                    lambda *_, n=number: self.does("F", n), prepend=True
                )
                stage.register_forward_hook(_backward(partial(self.does, "B", number)))
            layers = own_layers(stage.model)
            self.depths.append(len(layers))
            for index, layer in enumerate(layers):
                layer.register_forward_pre_hook(lambda *_, i=index: self._note("forward", i))
                if index == len(layers) - 1:
                    layer.register_forward_hook(lambda *_: self._note("after", 0))
                layer.register_forward_hook(_backward(partial(self._note, "backward", index)))

    def does(self, what: str, stage: int = 0) -> None:
        """What is seen from now on belongs to this action."""
        self.watch.look()
        self.marks.append((len(self.watch.changes), (what, stage), ("begin", 0)))

    def _note(self, what: str, layer: int) -> None:
        self.marks.append((len(self.watch.changes), None, (what, layer)))

    def _hear(self, name: str) -> None:
        if found := _SCHEDULED.fullmatch(name):
            self.does(found[2], int(found[1]) // self.ranks)

    def spans(self) -> Iterator[tuple[Action, list[tuple[list[Place], bool, int, int]]]]:
        """Each action, with the stretches of changes between its marks: by all names of the
        place, and whether the head is at work."""
        action: Action = ("", 0)
        parts: list[tuple[list[Place], bool, int, int]] = []
        ends = [at for at, *_ in self.marks[1:]] + [len(self.watch.changes)]
        for (start, begins, (what, layer)), stop in zip(self.marks, ends, strict=True):
            if begins is not None:
                if parts:
                    yield action, parts
                action, parts = begins, []
            depth = self.depths[action[1]] if what in ("forward", "backward") else 1
            head = what == "after" or (what == "begin" and action[0] in ("B", "I"))
            head = head and self.last[action[1]]
            parts.append(([(what, *side) for side in _sides(layer, depth)], head, start, stop))
        yield action, parts


def _backward(note: Callable[[], None]) -> Callable[[nn.Module, Any, Any], None]:
    """A hook of a module's forward pass: `note` is called when its backward pass begins."""

    def hook(_: nn.Module, args: Any, output: Any) -> None:
        found = next(x for x in tree_leaves(output) if isinstance(x, Tensor))
        if found.requires_grad:
            found.register_hook(lambda _: note())

    return hook


def _sides(index: int, size: int) -> list[tuple[str, int]]:
    """Where `index` is, from either end; the far end itself is not counted from the other."""
    found = []
    if index < size - 1 or size == 1:
        found.append(("front", index))
    if index > 0 or size == 1:
        found.append(("back", size - 1 - index))
    return found


def spans(marks: Marks, kind_of: dict[int, str], others: bool, again: bool = False) -> list[Span]:
    """What was seen since the first mark.

    `kind_of` has the kinds of blocks that last, "" for what is not counted; `others` that do
    count where asked, as buffers of communication. What is there at the end was there at the
    beginning, left by the step before; also the optimizer's states, which a first step makes.
    `again` where a step was before: what is made in this one is then made in each.
    """
    changes, roles, after = marks.watch.changes, marks.watch.roles, marks.watch.live()
    begun, sizes = marks.marks[0][0], Counter[int]()
    for number, size in changes[:begun]:
        sizes[number] += size
    moves = {n for n, _ in changes if sizes[n] == after.get(n, 0) and kind_of.get(n) != ""}
    if again:
        moves |= {n for n, _ in changes if not sizes[n] and n not in kind_of}
    now, kind_of = dict.fromkeys(KINDS, 0), dict(kind_of)
    for number, size in after.items():
        kind = kind_of.get(number, "communication" if others else "")
        if kind:
            now[kind] += size
    found = []
    for action, parts in marks.spans():
        before, most = dict(now), dict[Place, Bytes]()
        for names, head, start, stop in parts:
            highest, there = sum(now.values()), dict(now)
            for number, size in changes[start:stop]:
                if number not in moves:
                    continue
                if number not in kind_of:
                    kind_of[number] = roles.get(number, "logits" if head else "activations")
                now[kind_of[number]] += size
                if (total := sum(now.values())) > highest:
                    highest, there = total, dict(now)
            for name in names:
                if name not in most or sum(most[name].values()) < highest - sum(before.values()):
                    most[name] = _minus(there, before)
        found.append(Span(action, before, most, _minus(now, before)))
    return found


def extended(one: Sequence[Span], two: Sequence[Span], times: Sequence[float]) -> list[Span]:
    """`one` with the growth from it to `two`: `times` has how often, for each of the rank's
    stages and, last, for all that lies on it. Of places those that both have."""
    return [
        Span(
            a.action,
            _grown(a.before, b.before, times[-1]),
            {x: _grown(a.most[x], b.most[x], times[a.action[1]]) for x in a.most if x in b.most},
            _grown(a.left, b.left, times[a.action[1]]),
        )
        for a, b in zip(one, two, strict=True)
    ]


def replayed(seen: Sequence[Span], order: Sequence[Action]) -> list[Span]:
    """The actions of a step in the `order` of a schedule that has more of them than was `seen`.
    Each is as the one of its kind that is most like it: the first or the last of the step or
    neither, and after the same in its stage."""
    known = _told([span.action for span in seen])
    found, now = [seen[0]], _plus(seen[0].before, seen[0].left)
    for told in _told([seen[0].action, *order])[1:]:
        alike = (n for n, other in enumerate(known) if other.action == told.action)
        span = seen[max(alike, key=lambda n: known[n].like(told))]
        found.append(Span(span.action, now, span.most, span.left))
        now = _plus(now, span.left)
    return found + [span for span in seen if span.action[0] in AFTER]


@dataclass(frozen=True)
class _Told:
    """Of an action among others what makes it like another."""

    action: Action
    first: bool  # of its kind in a step
    before: Action | None  # what its stage did before
    after: Action | None  # and does next: FSDP gathers for it ahead
    last: bool

    def like(self, other: _Told) -> list[bool]:
        return [
            self.first == other.first, self.before == other.before, self.after == other.after,
            self.last == other.last,
        ]  # fmt: skip


def _told(order: Sequence[Action]) -> list[_Told]:
    firsts, befores = _behind(order)
    lasts, afters = _behind(order[::-1])
    return list(map(_Told, order, firsts, befores, reversed(afters), reversed(lasts)))


def _behind(order: Sequence[Action]) -> tuple[list[bool], list[Action | None]]:
    """Whether each is the first of its kind, and what its stage did before."""
    known, latest = set[Action](), dict[int, Action]()
    firsts, befores = [], []
    for action in order:
        firsts.append(action not in known)
        befores.append(latest.get(action[1]))
        known.add(action)
        if not action[0].startswith(("SEND", "RECV")):
            latest[action[1]] = action
    return firsts, befores


def peak(spans: Sequence[Span]) -> Bytes:
    """Bytes by kind where they are most."""
    found = (_plus(span.before, most) for span in spans for most in span.most.values())
    return max(found, key=lambda kinds: sum(kinds.values()))


def _minus(one: Bytes, other: Bytes) -> Bytes:
    return {kind: size - other[kind] for kind, size in one.items()}


def _plus(one: Bytes, other: Bytes) -> Bytes:
    return {kind: size + other[kind] for kind, size in one.items()}


def _grown(one: Bytes, two: Bytes, times: float) -> Bytes:
    return {kind: round(size + times * (two[kind] - size)) for kind, size in one.items()}
