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

    gradients: float
    activations: float
    logits: float = 0.0
    gathered: float = 0.0
    communication: float = 0.0
    temporary: float = 0.0  # of the optimizer's step


@dataclass(frozen=True)
class Place:
    """A layer of a stage, as the backward pass comes to it."""

    before: float  # bytes that the layers before it keep
    casts: float  # and autocast has for them
    forward: float  # the most within its forward pass
    backward: float  # and in its backward pass, with what it keeps
    gradients: float  # of parameters, within that
    layers_after: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Layers:
    """The layers of a stage for one micro batch."""

    kept: float
    casts: float
    input: float  # bytes that enter, or leave
    whole: float  # of all positions, where ranks have slices of them between blocks
    places: tuple[Place, ...]
    count: int
    products: float = 0.0  # gradients from which those of weights are made
    spare: float = 0.0  # that a layer's forward pass takes and gives back


@dataclass(frozen=True)
class Loss:
    """Bytes of norm, head and loss (see `rostra.optim.losses.chunked_cross_entropy`)."""

    kept: float = 0.0  # by the norm, for the backward pass
    output: float = 0.0  # hidden states that the loss is of
    logits: float = 0.0  # of a chunk, with what is made of them
    gradients: float = 0.0  # of the hidden states and the head, found with the loss
    copies: float = 0.0  # of the head's weight in 16 bits
    product: float = 0.0  # a summand of the head's gradient, with the chunk's gradient
    head: float = 0.0  # bytes of the gradient that the head's weight gets
    norm: float = 0.0  # the most in the norm's backward pass
    waits: float = 0.0  # between the passes, of what the loss found and the norm keeps
    outputs: float = 0.0  # that a pipeline keeps of each micro batch
    blocks: float = 0.0  # given back, too small for what comes after


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
    in_flight: float = 1.0  # micro batches whose activations are kept at once
    late: float = 0.0  # and the gradients of weights still to come
    first: bool = True
    stages: int = 0  # of a pipeline, on this rank
    outputs: float = 0.0  # of all micro batches, that are kept to the end of the step
    buffers: float = 0.0  # that hidden states are received into
    batch: float = 0.0  # tokens and what else all layers share


def moments(stage: Stage) -> Iterator[Moment]:
    """Where the peak can be."""
    p, layers, loss = stage.parts, stage.layers, stage.loss
    each = layers.kept + (layers.input * stage.stages if loss is None else loss.waits)
    fixed = stage.batch + (stage.in_flight - 1) * each + stage.late * layers.products
    fixed += stage.outputs
    if loss is None:
        grown = layers.kept + fixed + layers.casts + layers.input
        yield Moment(p.standing, grown, 0.0, _ahead(p, layers), stage.buffers)
    else:
        yield from _loss_moments(loss, stage, layers.kept + fixed)
    head = p.standing + (0.0 if p.collected or loss is None else loss.head)
    for place in layers.places:
        yield from _in_layer(place, stage, fixed, head)
    yield from _at_embedding(stage, fixed)
    yield Moment(
        max(p.standing, p.gradients),
        stage.batch,
        communication=p.resident,
        temporary=p.temporary,
    )


def _ahead(p: Parts, layers: Layers) -> float:
    """Gathered when all layers have gone forward: with the buffer of the last."""
    return p.around + p.layer * (1 if p.again else layers.count + 1) if layers.count else p.around


def _loss_moments(loss: Loss, stage: Stage, kept: float) -> Iterator[Moment]:
    """Logits; their gradients handed back; and the norm's backward pass."""
    p, layers, buffers = stage.parts, stage.layers, stage.buffers
    later = buffers + p.backward
    there = kept + layers.casts + layers.input + loss.kept + loss.output
    logits = loss.gradients + loss.copies + max(loss.logits, loss.product)
    ahead = _ahead(p, layers)
    yield Moment(p.standing, there, logits, ahead + p.held_last, buffers)
    back = ahead if p.again else ahead - p.layer
    taken = kept + layers.input + loss.kept
    yield Moment(p.standing, taken, 2 * loss.gradients, back, later)
    head = 0.0 if p.collected else loss.head
    yield Moment(p.standing + head, kept + loss.norm, 0.0, back, later)


def _in_layer(place: Place, stage: Stage, fixed: float, head: float) -> Iterator[Moment]:
    """Within a layer's forward and backward pass; and, sharded, where its gradients are on their
    way."""
    p, layers, buffers = stage.parts, stage.layers, stage.buffers
    there = layers.count - place.layers_after if p.layer and not p.again else 1
    forward = fixed + layers.whole + place.before + place.casts + place.forward
    yield Moment(p.standing, forward, 0.0, p.around + (there + 1) * p.layer, buffers)
    own = after = 0.0
    if not p.collected:
        own, after = place.gradients, place.layers_after * p.layer_gradients
    gradients, gathered = head + own + after, _gathered(p, layers, place)
    buffers += p.backward
    if not place.last:  # by then a bucket is full, a layer's gradients on their way
        buffers += p.buckets + (0.0 if p.stays else p.reduced_layer)
    grown = p.layer if p.stays else 0.0  # its gradients, before they are added
    within = fixed + place.before + place.backward - own + grown
    yield Moment(gradients, within, 0.0, gathered, buffers)
    if p.layer:
        sent = stage.buffers + p.reduced_layer + p.reduced_part
        left = gathered if p.stays else gathered - p.layer  # its parameters are given back first
        yield Moment(gradients, fixed + place.before + layers.input, 0.0, left, sent)


def _gathered(p: Parts, layers: Layers, place: Place) -> float:
    """Parameters of all ranks that are here in a layer's backward pass."""
    if not p.again:
        count = layers.count if p.stays else layers.count - place.layers_after
    else:
        count = (1 if place.first else 2) + (place.layers_after if p.stays else 0)
    return p.around + p.layer * count


def _at_embedding(stage: Stage, fixed: float) -> Iterator[Moment]:
    """Where all gradients of layers are there, and that of the embedding comes."""
    p, layers, buffers = stage.parts, stage.layers, stage.buffers + stage.parts.backward
    extra = p.embedding if p.tied or (p.collected and not p.layer) else 0.0
    if not p.layer:
        grown = layers.input if stage.first else 0.0
        yield Moment(
            max(p.standing, p.gradients), fixed + grown + extra, communication=buffers + p.buckets
        )
        return
    gradients = p.standing + layers.count * p.layer_gradients + p.around_gradients
    inside = layers.count * p.layer if p.stays else 0.0
    there = fixed + layers.input + extra
    yield Moment(gradients, there, 0.0, p.around + inside, buffers + p.reduced_layer)
    yield Moment(gradients, fixed, 0.0, inside, buffers + p.reduced_around)
    if p.stays:
        yield Moment(gradients, fixed, 0.0, p.around + inside, buffers + p.reduced_layer)
