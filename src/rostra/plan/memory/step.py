"""When in a step a rank needs most: bytes at the end of the forward pass, through the backward
pass and in the optimizer's step, for the torch engine.

Peaks are looked for where they can be: in the loss (logits), where its gradients are taken, in
the backward pass of the first and the last layer of each kind (between them memory changes
alike from layer to layer), at the embedding, and in the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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
    reduced_layer: float = 0.0  # what a layer's reduce-scatter takes
    reduced_around: float = 0.0
    reduced_part: float = 0.0  # of what comes of it, before it is added to what was there
    around_gradients: float = 0.0  # not yet reduced
    around_part: float = 0.0  # reduced
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
    buffers: float = 0.0  # that hidden states are received into
    batch: float = 0.0  # tokens and what else all layers share
    more: list[str] = field(default_factory=list)


def moments(stage: Stage) -> Iterator[Moment]:
    """Where the peak can be."""
    p, layers = stage.parts, stage.layers
    fixed = stage.batch + (stage.in_flight - 1) * layers.kept
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
    gathered = p.around + (ahead if p.again else layers.count * p.layer + ahead)
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
    gathered = waiting = 0.0
    if p.layer:
        ahead = 0.0 if place.first else p.layer
        gathered = p.around + p.layer + ahead
        if not p.again:
            gathered = p.around + p.layer * (layers.count - place.layers_after)
        waiting = 0.0 if place.last else p.reduced_layer
    sent = 0.0 if place.last else p.buckets  # by then one is full
    yield replace(
        always,
        gradients=always.gradients + head + own + after,
        activations=fixed + place.before + place.backward - own,
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
    yield replace(
        always,
        gradients=after + p.around_gradients,
        activations=fixed + layers.input + extra,
        gathered=p.around,
        communication=always.communication + p.reduced_layer,
    )
    yield replace(
        always,
        gradients=after + p.around_gradients,
        activations=fixed,
        gathered=p.around,
        communication=always.communication + p.reduced_around,
    )
