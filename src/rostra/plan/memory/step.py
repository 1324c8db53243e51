"""When in a step a rank needs most: bytes at the end of the forward pass, through the backward
pass and in the optimizer's step, for the torch engine.

Peaks are looked for where they can be: in the loss (logits), where its gradients are taken, in
the backward pass of the first and the last layer of each kind (between them memory changes
alike from layer to layer), at the embedding, and in the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

FLOAT = 4


@dataclass(frozen=True)
class Moment:
    """What lives at a moment beside what always does."""

    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    communication: float = 0.0
    temporary: float = 0.0  # of the optimizer's step

    @property
    def total(self) -> float:
        return (
            self.gradients + self.activations + self.logits + self.gathered + self.communication
            + self.temporary
        )  # fmt: skip


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
    temporary: float = 0.0  # in the optimizer's step


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline, or the whole model, on one rank."""

    layers: Layers
    loss: Loss | None
    parts: Parts
    in_flight: float = 1.0  # micro batches whose activations are kept at once
    first: bool = True
    stages: int = 0  # of a pipeline, on this rank
    outputs: float = 0.0  # of all micro batches, that are kept to the end of the step
    buffers: float = 0.0  # that hidden states are received into
    batch: float = 0.0  # tokens and what else all layers share


def moments(stage: Stage) -> Iterator[Moment]:
    """Where the peak can be."""
    p, layers = stage.parts, stage.layers
    sent = 0.0 if stage.loss is not None else layers.input * stage.stages  # and kept till then
    fixed = stage.batch + (stage.in_flight - 1) * (layers.kept + sent) + stage.outputs
    kept = layers.kept + fixed
    always = Moment(p.standing, communication=stage.buffers)
    ahead = layers.count and p.layer  # of layers whose parameters are there, or on their way
    held = p.around + (ahead if p.again else layers.count * p.layer)
    if stage.loss is None:
        grown = layers.casts + layers.input
        yield replace(always, activations=kept + grown, gathered=held + ahead)
        first = Moment()
    else:
        yield from _loss_moments(stage.loss, always, kept, layers, held, ahead, p)
        first = Moment(0.0 if p.collected else stage.loss.head)
    for place in layers.places:
        yield from _in_layer(place, stage, always, fixed, first.gradients)
    yield from _at_embedding(stage, always, fixed)
    yield replace(
        always,
        gradients=max(p.standing, p.gradients),
        activations=stage.batch,
        temporary=p.temporary,
    )


def _loss_moments(
    loss: Loss, always: Moment, kept: float, layers: Layers, held: float, ahead: float, p: Parts
) -> Iterator[Moment]:
    there = kept + layers.casts + layers.input + loss.kept + loss.output
    gathered = p.around + p.held_last + (ahead if p.again else layers.count * p.layer + ahead)
    logits = loss.gradients + loss.copies + max(loss.logits, loss.product)
    yield replace(always, activations=there, logits=logits, gathered=gathered)
    taken = kept + layers.input + loss.kept
    gathered = held if p.again else p.around + layers.count * p.layer
    yield replace(always, activations=taken, logits=2 * loss.gradients, gathered=gathered)
    yield replace(
        always,
        gradients=always.gradients + (0.0 if p.collected else loss.head),
        activations=kept + loss.norm,
        gathered=gathered,
    )


def _in_layer(
    place: Place, stage: Stage, always: Moment, fixed: float, head: float
) -> Iterator[Moment]:
    """Within a layer's forward and backward pass; and, sharded, where its gradients are on their
    way."""
    p, layers = stage.parts, stage.layers
    there = layers.count - place.layers_after if p.layer and not p.again else 1
    yield replace(
        always,
        activations=fixed + layers.whole + place.before + place.casts + place.forward,
        gathered=p.around + (there + 1) * p.layer,
    )
    own = 0.0 if p.collected else place.gradients
    after = 0.0 if p.collected else place.layers_after * p.layer_gradients
    gathered = _gathered(p, layers, place)
    waiting = 0.0 if place.last or p.stays else p.reduced_layer
    sent = 0.0 if place.last else p.buckets  # by then one is full
    grown = p.layer if p.stays else 0.0  # its gradients, before they are added
    yield replace(
        always,
        gradients=always.gradients + head + own + after,
        activations=fixed + place.before + place.backward - own + grown,
        gathered=gathered,
        communication=always.communication + waiting + sent,
    )
    if p.layer:
        yield replace(
            always,
            gradients=always.gradients + head + own + after,
            activations=fixed + place.before + layers.input,
            gathered=gathered,
            communication=always.communication + p.reduced_layer + p.reduced_part,
        )


def _gathered(p: Parts, layers: Layers, place: Place) -> float:
    """Parameters of all ranks that are here in a layer's backward pass."""
    if p.stays:
        ahead = 2 if p.again and not place.first else 1
        count = place.layers_after + ahead if p.again else layers.count
        return p.around + p.layer * count
    if p.again:
        return p.around + p.layer * (1 if place.first else 2)
    return p.around + p.layer * (layers.count - place.layers_after)


def _at_embedding(stage: Stage, always: Moment, fixed: float) -> Iterator[Moment]:
    """Where all gradients of layers are there, and that of the embedding comes."""
    p, layers = stage.parts, stage.layers
    if not p.layer:
        extra = p.embedding if p.tied or p.collected else 0.0
        grown = layers.input if stage.first else 0.0
        yield replace(
            always,
            gradients=max(p.standing, p.gradients),
            activations=fixed + grown + extra,
            communication=always.communication + p.buckets,
        )
        return
    after = always.gradients + layers.count * p.layer_gradients
    extra = p.embedding if p.tied else 0.0
    stays = layers.count * p.layer if p.stays else 0.0
    yield replace(
        always,
        gradients=after + p.around_gradients,
        activations=fixed + layers.input + extra,
        gathered=p.around + stays,
        communication=always.communication + p.reduced_layer,
    )
    yield replace(
        always,
        gradients=after + p.around_gradients,
        activations=fixed,
        gathered=p.around + stays,
        communication=always.communication + max(p.reduced_around, p.reduced_layer),
    )
