"""When in a step a rank needs most: bytes at the end of the forward pass, through the backward
pass and in the optimizer's step, for the torch engine.

Peaks are looked for where they can be: in the loss (logits), where its gradients are taken, in
the backward pass of the first and the last layer of each kind (between them memory changes
alike from layer to layer), at the embedding, and in the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

FLOAT = 4


class Moment(NamedTuple):
    """Bytes that live at a moment beside what always does."""

    gradients: complex
    activations: complex
    logits: complex = 0.0
    gathered: complex = 0.0
    communication: complex = 0.0
    temporary: complex = 0.0  # of the optimizer's step


class Place(NamedTuple):
    """A layer of a stage, as the backward pass comes to it."""

    before: complex  # bytes that the layers before it keep
    casts: complex  # and autocast has for them
    forward: tuple[complex, ...]  # the most within its forward pass
    backward: tuple[complex, ...]  # and in its backward pass, with what it keeps
    gradients: complex  # of parameters, within that
    layers_after: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Layers:
    """The layers of a stage for one micro batch."""

    kept: complex
    casts: complex
    input: complex  # bytes that enter, or leave
    whole: complex  # of all positions, where ranks have slices of them between blocks
    places: tuple[Place, ...]
    count: int
    halfway: complex = 0.0  # between the two parts of zero bubble's backward pass
    spare: tuple[complex, ...] = (0.0,)  # that a layer's forward pass takes and gives back


@dataclass(frozen=True)
class Loss:
    """Bytes of norm, head and loss (see `rostra.optim.losses.chunked_cross_entropy`)."""

    kept: complex = 0.0  # by the norm, for the backward pass
    output: complex = 0.0  # hidden states that the loss is of
    logits: complex = 0.0  # of a chunk, with what is made of them
    gradients: complex = 0.0  # of the hidden states and the head, found with the loss
    copies: complex = 0.0  # of the head's weight in 16 bits
    product: complex = 0.0  # a summand of the head's gradient, with the chunk's gradient
    head: complex = 0.0  # bytes of the gradient that the head's weight gets
    norm: tuple[complex, ...] = (0.0,)  # the most in the norm's backward pass
    waits: complex = 0.0  # between the passes, of what the loss found and the norm keeps
    outputs: complex = 0.0  # that a pipeline keeps of each micro batch
    blocks: complex = 0.0  # given back, too small for what comes after


@dataclass(frozen=True)
class Parts:
    """How parameters and gradients of a stage lie over ranks."""

    collected: bool  # gradients of a micro batch are added to those there, at once
    standing: float  # bytes of gradients that live through all of the step
    gradients: float  # of all parameters, at the end of the backward pass
    layer_gradients: float = 0.0  # that remain of a layer's, in its rank's part
    embedding: float = 0.0  # bytes of the embedding's gradient as it is made
    tied: bool = False
    # of sharding: bytes of a layer and of what is around the layers
    layer: float = 0.0
    around: float = 0.0
    again: bool = False  # layers are gathered again for the backward pass
    stays: bool = False  # and stay so after it, their gradients whole, for more micro batches
    reduced_layer: float = 0.0  # what a layer's reduce-scatter takes
    reduced_around: float = 0.0
    reduced_part: float = 0.0  # of what comes of it, before it is added to what was there
    around_gradients: float = 0.0  # not yet reduced
    pool: float = 0.0  # of reduced gradients, a step's
    held_last: float = 0.0  # of the last layer, gathered from its forward pass on
    buckets: float = 0.0  # under way
    backward: float = 0.0  # and buffers that are there all through the backward pass
    resident: float = 0.0  # or are never given back
    temporary: float = 0.0  # in the optimizer's step


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline, or the whole model, on one rank."""

    layers: Layers
    loss: Loss | None
    parts: Parts
    first: bool = True

    def waits(self, stages: int) -> complex:
        """Bytes of a micro batch between its passes, on a rank with so many stages."""
        after = self.layers.input * stages if self.loss is None else self.loss.waits
        return self.layers.kept + after


def moments(stage: Stage) -> Iterator[Moment]:
    """Where the peak of the passes can be, of a micro batch alone. What else there is, of other
    micro batches and to receive them, is there all the time."""
    p, layers, loss = stage.parts, stage.layers, stage.loss
    if loss is None:
        grown = layers.kept + layers.casts + layers.input
        yield Moment(p.standing, grown, 0.0, _ahead(p, layers))
    else:
        yield from _loss_moments(loss, p, layers)
    head = p.standing + (0.0 if p.collected or loss is None else loss.head)
    for place in layers.places:
        yield from _in_layer(place, p, layers, head)
    yield from _at_embedding(p, layers, stage.first)


def update(p: Parts) -> Moment:
    """The optimizer's step."""
    most = max(p.standing, p.gradients)
    return Moment(most, 0.0, communication=p.resident, temporary=p.temporary)


def _ahead(p: Parts, layers: Layers) -> float:
    """Gathered when all layers have gone forward: with the buffer of the last."""
    return p.around + p.layer * (1 if p.again else layers.count + 1) if layers.count else p.around


def _loss_moments(loss: Loss, p: Parts, layers: Layers) -> Iterator[Moment]:
    """Logits; their gradients handed back; and the norm's backward pass."""
    there = layers.kept + layers.casts + layers.input + loss.kept + loss.output
    ahead = _ahead(p, layers)
    for most in (loss.logits, loss.product):
        logits = loss.gradients + loss.copies + most
        yield Moment(p.standing, there, logits, ahead + p.held_last)
    back = ahead if p.again else ahead - p.layer
    taken = layers.kept + layers.input + loss.kept
    yield Moment(p.standing, taken, 2 * loss.gradients, back, p.backward)
    head = 0.0 if p.collected else loss.head
    for most in loss.norm:
        yield Moment(p.standing + head, layers.kept + most, 0.0, back, p.backward)


def _in_layer(place: Place, p: Parts, layers: Layers, head: complex) -> Iterator[Moment]:
    """Within a layer's forward and backward pass; and, sharded, where its gradients are on their
    way."""
    there = layers.count - place.layers_after if p.layer and not p.again else 1
    before = layers.whole + place.before + place.casts
    for most in place.forward:
        yield Moment(p.standing, before + most, 0.0, p.around + (there + 1) * p.layer)
    own: complex = 0.0
    after = 0.0
    if not p.collected:
        own, after = place.gradients, place.layers_after * p.layer_gradients
    gradients, gathered = head + own + after, _gathered(p, layers, place)
    sent = p.backward
    if not place.last:  # by then a bucket is full, a layer's gradients on their way
        sent += p.buckets + (0.0 if p.stays else p.reduced_layer)
    grown = p.layer if p.stays else 0.0  # its gradients, before they are added
    for most in place.backward:
        yield Moment(gradients, place.before + most - own + grown, 0.0, gathered, sent)
    if p.layer:
        left = gathered if p.stays else gathered - p.layer  # its parameters are given back first
        sent = p.reduced_layer + p.reduced_part
        yield Moment(gradients, place.before + layers.input, 0.0, left, sent)


def _gathered(p: Parts, layers: Layers, place: Place) -> float:
    """Parameters of all ranks that are here in a layer's backward pass."""
    if not p.again:
        count = layers.count if p.stays else layers.count - place.layers_after
    else:
        count = (1 if place.first else 2) + (place.layers_after if p.stays else 0)
    return p.around + p.layer * count


def _at_embedding(p: Parts, layers: Layers, first: bool) -> Iterator[Moment]:
    """Where all gradients of layers are there, and that of the embedding comes."""
    extra = p.embedding if p.tied or (p.collected and not p.layer) else 0.0
    if not p.layer:
        grown = layers.input if first else 0.0
        gradients = max(p.standing, p.gradients)
        yield Moment(gradients, grown + extra, communication=p.backward + p.buckets)
        return
    gradients = p.standing + layers.count * p.layer_gradients + p.around_gradients
    inside = layers.count * p.layer if p.stays else 0.0
    sent, around = p.backward + p.reduced_layer, p.backward + p.reduced_around
    yield Moment(gradients, layers.input + extra, 0.0, p.around + inside, sent)
    yield Moment(gradients, 0.0, 0.0, inside, around)
    if p.stays:
        yield Moment(gradients, 0.0, 0.0, p.around + inside, sent)
