"""A layer's forward pass as sizes alone, and what of it lives when, forward and backward.

Autograd keeps a tensor while an operation that comes later needs it, or one that goes backward;
a gradient from the first operation that gives it to the one that takes it. A `Tape` is told
the operations of a layer and what each saves, and finds the bytes between the two passes and at
the peak of either, with any stretch of it computed again (Chen et al. 2016, arXiv:1604.06174).

Sizes are those of `rostra.plan.memory.growth`: one tape tells of every micro batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rostra.plan.memory.growth import highest


@dataclass(eq=False)
class Value:
    """A tensor: its bytes, and whether a gradient flows to it."""

    size: complex
    flows: bool = True
    base: Value | None = None  # in whose memory it lies: a view
    weight: bool = False  # a parameter, whose own memory is counted elsewhere
    cast: bool = False  # a parameter in 16 bits, which autocast keeps to the end of the pass

    @property
    def owner(self) -> Value:
        return self if self.base is None else self.base.owner


@dataclass(frozen=True)
class Step:
    """An operation. Backward it makes a gradient of the size of each input to which one flows,
    but for those in `passes`, whose gradient is that of the output itself."""

    inputs: tuple[Value, ...]
    output: Value
    saves: tuple[Value, ...]
    passes: tuple[Value, ...]
    scratch: complex  # bytes of temporary results backward
    before: complex  # and forward
    dear: bool  # whose result is kept where cheap ones are computed again
    remade: tuple[Value, ...] = ()  # of what it saves, casts that the backward pass makes again


@dataclass(frozen=True)
class Profile:
    """Bytes of a layer: each peak with all that lives of the layer then, its input and output
    (backward, their gradients) too."""

    kept: complex  # from one pass to the other, the layer's input among it
    casts: complex  # of parameters, that only autocast keeps, to the end of the forward pass
    forward: tuple[complex, ...]  # the highest of these
    backward: tuple[complex, ...]
    left: complex  # gradients of parameters after the backward pass
    copies: complex  # of parameters in 16 bits, within what is kept
    # between the two parts of zero bubble's backward pass: gradients of what comes of parameters
    # (products, and two norms), and what was computed again
    halfway: complex


@dataclass
class Tape:
    """The operations of a layer in their order."""

    steps: list[Step] = field(default_factory=list)

    def run(
        self,
        *inputs: Value,
        size: complex,
        saves: Iterable[Value] = (),
        passes: Iterable[Value] = (),
        scratch: complex = 0.0,
        before: complex = 0.0,
        dear: bool = False,
        view: bool = False,
        cast: bool = False,
        remade: Iterable[Value] = (),
    ) -> Value:
        """Add an operation; gives its output, which as a `view` lies in the first input."""
        flows = any(x.flows for x in inputs)
        output = Value(size, flows, inputs[0] if view else None, cast=cast)
        kept = tuple(saves) if flows else ()
        again = tuple(remade)
        self.steps.append(Step(inputs, output, kept, tuple(passes), scratch, before, dear, again))
        return output

    def profile(
        self,
        start: Value,
        again: Sequence[range] = (),
        *,
        dear: bool = False,
        least: bool = False,
        collected: bool = False,
    ) -> Profile:
        """Of the layer whose input is `start`, the steps of each stretch in `again` being run
        once more in the backward pass, but for those that are dear if their results are kept
        (with `least`, those that are needed). Where gradients are `collected`, something takes
        each parameter's away at once."""
        kept: set[int] = set()
        for stretch in again if dear else ():
            wanted = self.needed(stretch)
            chosen = (i for i in stretch if self.steps[i].dear)
            kept |= {i for i in chosen if not least or self.steps[i].output in wanted}
        player = _Player(self.steps, again, kept, collected)
        return player.play(start)

    def fuse(self) -> None:
        """As a compiler has it, which computes what lies between products and attention in
        registers: only what these take or give has memory, and one cast of a value is enough."""
        given = {x for step in self.steps if step.dear for x in (*step.inputs, *step.saves)}
        given |= {step.output for step in self.steps if step.dear} | {self.steps[-1].output}
        for step in self.steps:
            if step.output not in given and not step.output.cast:
                step.output.size = 0.0
        self.steps = [
            step if step.dear else replace(step, scratch=0.0, before=0.0) for step in self.steps
        ]

    def needed(self, steps: range) -> set[Value]:
        """Of the dear results in a stretch, those without which what is saved there could not be
        computed again."""
        wanted: set[Value] = set()
        for index in reversed(steps):
            step = self.steps[index]
            wanted.update(step.saves)
            if step.output in wanted and not step.dear:
                wanted.update(step.inputs)
        return wanted


class _Live:
    """Memory that is held for reasons, each of which lets go of it once."""

    def __init__(self) -> None:
        self.now: complex = 0.0
        self.peaks: set[complex] = set()
        self.reasons: Counter[Value] = Counter()

    def hold(self, value: Value) -> None:
        owner = value.owner
        if owner.weight:
            return
        self.reasons[owner] += 1
        if self.reasons[owner] == 1:
            self.now += owner.size
            self.peaks.add(self.now)

    def drop(self, value: Value) -> None:
        owner = value.owner
        if owner.weight:
            return
        self.reasons[owner] -= 1
        if not self.reasons[owner]:
            self.now -= owner.size

    def peek(self, more: complex) -> None:
        self.peaks.add(self.now + more)


class _Player:
    """A layer's two passes."""

    def __init__(
        self, steps: list[Step], again: Sequence[range], kept: set[int], collected: bool
    ) -> None:
        self.steps, self.kept, self.collected = steps, kept, collected
        self.stretch = {i: stretch for stretch in again for i in stretch}
        self.live = _Live()
        self.gradients: dict[Value, Value] = {}  # and the memory that each lies in
        self.left: complex = 0.0

    def play(self, start: Value) -> Profile:
        live, end = self.live, self.steps[-1].output
        live.hold(start)
        casts = self._forward(range(len(self.steps)), saving=False)
        forward, with_casts = highest(live.peaks), live.now
        for value in casts:
            live.drop(value)
        without = live.now
        live.drop(end)
        kept, live.peaks = live.now, {live.now}
        self._give(end, self._new(end.size))
        for index in reversed(range(len(self.steps))):
            stretch = self.stretch.get(index)
            if stretch is not None and index == stretch[-1]:
                for value in self._forward(self._until_saved(stretch), saving=True):
                    live.drop(value)
            self._backward(self.steps[index], stretch is None)
            if stretch is not None and index == stretch[0]:
                self._let_go(stretch)
        alone = with_casts - without
        copies, halfway = sum(v.size for v in casts) - alone, self._products(start)
        backward = highest(live.peaks)
        return Profile(kept, alone, forward, backward, self.left, copies, halfway)

    def _products(self, start: Value) -> complex:
        found = (s for s in self.steps if any(x.weight or x.cast for x in s.inputs))
        return sum(s.output.size for s in found if s.dear) + 2 * start.size

    def _forward(self, indices: range, saving: bool) -> list[Value]:
        """Run some steps; gives the casts that autocast holds after them. `saving` is the second
        time, when what a stretch starts from is held already."""
        live, casts = self.live, []
        last = {x: i for i in indices for x in self.steps[i].inputs}
        made: set[Value] = set()
        for index in indices:
            step, stretch = self.steps[index], self.stretch.get(index)
            if stretch is not None and not saving:
                for value in self._held(stretch) if index == stretch[0] else ():
                    live.hold(value)
                if index in self.kept:
                    live.hold(step.output)
            live.hold(step.output)
            if saving and index in self.kept:
                live.drop(step.output)  # found, and taken
            live.peek(step.before)
            made.add(step.output)
            casts += [step.output] if step.output.cast else []
            for value in step.saves if saving or stretch is None else ():
                if saving or value not in step.remade:
                    live.hold(value)
            done = {x for x in step.inputs if last[x] == index and not x.cast}
            for value in done if not saving else done & made:
                live.drop(value)
            if saving and step.output not in last:
                live.drop(step.output)
        return casts

    def _held(self, stretch: range) -> set[Value]:
        """What a stretch needs from before it."""
        steps = [self.steps[i] for i in stretch]
        return {x for step in steps for x in step.inputs} - {step.output for step in steps}

    def _let_go(self, stretch: range) -> None:
        """The backward pass has gone through a stretch."""
        for value in self._held(stretch):
            self.live.drop(value)
        for index in self.kept.intersection(stretch).difference(self._until_saved(stretch)):
            self.live.drop(self.steps[index].output)

    def _until_saved(self, stretch: range) -> range:
        """What of it has to be run again."""
        return range(stretch[0], 1 + max(i for i in stretch if self.steps[i].saves))

    def _backward(self, step: Step, plain: bool) -> None:
        """Of a step that is `plain`, in no stretch: within one there is all that it saves."""
        if not step.output.flows:
            return
        remade = step.remade if plain else ()
        gradient = self.gradients.pop(step.output)
        new = [(x, self._new(x.size)) for x in step.inputs if x.flows and x not in step.passes]
        self.live.peek(step.scratch + sum(value.size for value in remade))
        for value in step.passes:
            if value.flows:
                self.live.hold(gradient)
                new.append((value, gradient))
        self.live.drop(gradient)
        for value in step.saves:
            if value not in remade:
                self.live.drop(value)
        for value, memory in new:
            self._give(value, memory)

    def _new(self, size: complex) -> Value:
        memory = Value(size)
        self.live.hold(memory)
        return memory

    def _give(self, value: Value, memory: Value) -> None:
        """A gradient of `value`, to be added to what there is: in place, where nothing else has
        that memory."""
        live = self.live
        if value.weight:
            if self.collected:
                live.drop(memory)
            else:
                self.left += value.size
            return
        before = self.gradients.get(value)
        if before is None:
            self.gradients[value] = memory
        elif live.reasons[before] == 1:
            live.drop(memory)
        else:
            self.gradients[value] = self._new(value.size)
            live.drop(before)
            live.drop(memory)
