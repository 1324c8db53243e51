"""What the layers and the loss of a rank keep and make for a micro batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

from rostra.build.stages import loss_chunk
from rostra.layout import Layout
from rostra.plan.conventions import Conventions
from rostra.plan.job import Job, Layer
from rostra.plan.memory.growth import TOKENS, highest
from rostra.plan.memory.lasting import is_collected, is_sharded, recasts
from rostra.plan.memory.layers import norm_profile, program
from rostra.plan.memory.setting import Kernel, Setting
from rostra.plan.memory.step import Layers, Loss, Place
from rostra.plan.memory.tape import Profile
from rostra.plan.memory.weights import FLOAT, HALF, Weights

# Bytes that a logit of a chunk takes at the most: logits, probabilities, two of their gradient
# in float32, and where the label is.
CHUNKED = 17
# Of logits that exist at once: their log-softmax and the gradients of two operations in float32;
# over a vocabulary that is split, another; or, fused, logits and their gradient in 16 bits.
WHOLE, SPLIT, FUSED = 12, 16, 4
WINDOWED = 8192  # positions up to which the kernel for CPUs is chosen

_of_layers = attrgetter(
    "tensor", "activation_checkpointing", "compute", "quantization", "adapter", "compile"
)


@dataclass(frozen=True)
class Work:
    """Of one micro batch on a rank."""

    layers: Layers
    loss: Loss | None
    offloaded: complex = 0.0  # that wait on the host


class Working:
    """What a job's layers and loss take under a layout, whatever its micro batch."""

    def __init__(self, job: Job, device: str, way: Conventions) -> None:
        self.job, self.device, self.way = job, device, way
        vocabulary = job.sizes.vocabulary
        layers = [layer for layer, _ in job.sizes.layers]
        windows = any(layer.window is not None for layer in layers)
        scores = job.config.model.attention == "eager"
        self._pairs = scores or windows or job.config.data.isolate_documents
        self._profiles: dict[Hashable, Profile] = {}
        self.chunk = job.config.train.loss_chunk or loss_chunk(vocabulary, device == "gpu")

    def of_layers(self, x: Layout) -> tuple[Hashable, ...]:
        """What of a layout decides what its layers keep."""
        # a mask or scores grow with the whole sample; else it matters only whether it is split
        split = (x.context, x.context_method) if self._pairs else x.context > 1
        return (*_of_layers(x), split, is_sharded(x), is_collected(x), recasts(x))

    def work(
        self,
        x: Layout,
        profiles: Sequence[Profile],
        last: bool,
    ) -> Work:
        """Of a rank whose layers have `profiles`."""
        setting = self.setting(x, self.job.sizes.layers[0][0])
        size = setting.tokens / setting.tensor * self.job.sizes.hidden * setting.stream
        offloads = x.activation_checkpointing == "offload"
        ends: list[Place] = []
        between: dict[int, list[Place]] = {}  # by profile
        kept: complex = 0.0
        casts: complex = 0.0
        away: complex = 0.0
        for at, profile in enumerate(profiles):
            before, behind = kept, len(profiles) - 1 - at
            if offloads and at and self.device == "gpu":  # fetched ahead
                before += profiles[at - 1].kept - profiles[at - 1].copies
            at_layer = (before, casts, profile.forward, profile.backward, profile.left)
            place = Place(*at_layer, behind, at == 0, behind == 0)
            alike = ends if place.first or place.last else between.setdefault(id(profile), [])
            if alike is not ends and len(alike) > 1 and _straight(alike[-2], alike[-1], place):
                alike.pop()
            alike.append(place)
            stays = profile.copies if offloads else profile.kept
            kept, away, casts = kept + stays, away + profile.kept - stays, casts + profile.casts
        places = sorted((*ends, *chain(*between.values())), key=lambda place: -place.layers_after)
        whole = size * setting.tensor if setting.tensor > 1 else 0.0
        kinds = dict.fromkeys(profiles)
        spare = highest((0.0, *(most - p.kept - size for p in kinds for most in p.forward)))
        halfway = sum(p.halfway for p in profiles)
        count = len(profiles)
        layers = Layers(kept, casts, size, whole, tuple(places), count, halfway, spare)
        loss = self._loss(x, setting) if last else None
        return Work(layers, loss, away)

    def profile(self, x: Layout, layer: Layer, again: bool, first: bool) -> Profile:
        """Of a layer that is computed `again` where the layout says so; the `first` of a frozen
        model has an input that no gradient flows to."""
        key = (layer, again, first, *self.of_layers(x))
        if key not in self._profiles:
            self._profiles[key] = self._profile(x, layer, again, first)
        return self._profiles[key]

    def _profile(self, x: Layout, layer: Layer, again: bool, first: bool) -> Profile:
        made = program(self.job.sizes, layer, self.setting(x, layer), first)
        mode = x.activation_checkpointing if again else "none"
        if x.compile:
            made.tape.fuse()
            mode = "selective:operations" if mode in ("none", "offload") else mode
        every = range(len(made.tape.steps))
        stretches = {
            "none": [], "offload": [], "selective:attention": [made.attention],
            "selective:mlp": [made.mlp],
        }  # fmt: skip
        recomputed = stretches.get(mode, [every])
        found = made.tape.profile(
            made.start,
            recomputed,
            dear=mode == "selective:operations",
            least=x.compile,
            collected=is_collected(x),
        )
        if not recomputed or x.compile:
            return found
        whole = self.profile(replace(x, activation_checkpointing="none"), layer, False, first)
        return replace(found, halfway=whole.halfway + whole.kept - found.kept)

    def setting(self, x: Layout, layer: Layer) -> Setting:
        """What a layer runs under."""
        weights = Weights(self.job, x.quantization, x.adapter, HALF.get(x.compute, FLOAT))
        half, sharded = HALF.get(x.compute, FLOAT), is_sharded(x)
        pure = x.compute == "bf16_pure"
        quantized = frozenset(n for linear in layer.linears for n in weights.quantized(linear))
        copies = half == 2 and not sharded and not pure and not weights.frozen
        return Setting(
            length=self.job.length,
            context=x.context,
            tensor=x.tensor,
            stream=half if pure or self.way.half_stream else FLOAT,
            product=half,
            weight=2 if pure or (sharded and half == 2) else FLOAT,
            copies=copies,
            # those of parameters: neither of a tensor rank's part nor within what is compiled
            keeps_copies=x.tensor == 1 and not x.compile and not recasts(x),
            recasts=copies and recasts(x),
            trains=not weights.frozen,
            quantized=quantized,
            adapted=weights.adapted(layer),
            kernel=self.kernel(x, layer),
            wide_powers=self.device == "gpu",
            every_other=self.way.every_other,
        )

    def kernel(self, x: Layout, layer: Layer) -> Kernel:
        """Which attention computes a layer: `rostra.models.attention.choose`."""
        asked = self.job.config.model.attention
        if x.context > 1 and x.context_method == "ring":
            return "ring"
        if asked == "eager":
            return "eager"
        quick = self.device == "cpu" and x.compile and self.job.length <= WINDOWED
        if asked == "blocked" or (asked == "auto" and quick):
            return "blocked"
        windowed = layer.window is not None and layer.window < self.job.length
        return "masked" if self.job.config.data.isolate_documents or windowed else "flash"

    def shared(self, x: Layout) -> complex:
        """Bytes of what all layers share: rotations, and masks for each kind of layer."""
        length, isolate = self.job.length, self.job.config.data.isolate_documents
        layers = [layer for layer, _ in self.job.sizes.layers]
        stream = self.setting(x, layers[0]).stream
        rotations = 2.0 * stream * self.job.sizes.head_size
        masks = {layer.window for layer in layers if self.kernel(x, layer) == "masked"}
        positions = TOKENS if isolate else length // x.context
        return rotations * positions + TOKENS * length * x.context * len(masks)

    def _loss(self, x: Layout, setting: Setting) -> Loss:
        """Norm, head and loss."""
        s, each = self.job.sizes, setting.product
        weights = Weights(self.job, x.quantization, x.adapter, each)
        hidden = setting.tokens * s.hidden
        vocabulary = s.vocabulary / x.tensor
        matrix = vocabulary * s.hidden
        learned = matrix if weights.head_trains else vocabulary * weights.head_rank
        norm = norm_profile(s, setting)
        kept = norm.kept - setting.tokens / setting.tensor * s.hidden * setting.stream
        output = hidden * setting.stream
        if self.way.logits != "chunked":
            whole = WHOLE if x.tensor == 1 else SPLIT
            bytes_ = whole if self.way.logits == "whole" else FUSED
            numbers = setting.tokens * vocabulary
            return Loss(
                kept=kept + output,
                logits=numbers * bytes_,
                head=learned * each,
                norm=norm.backward,
                waits=kept + output,
                blocks=numbers * each if self.way.logits == "whole" else 0.0,
                outputs=numbers * each if x.pipeline > 1 else 0.0,
            )
        return self._chunked(x, setting, kept, norm.backward, weights)

    def chunks(self, x: Layout) -> bool:
        """Whether a micro batch has more tokens than the loss takes at once."""
        return self.tokens(x) > self.chunk

    def tokens(self, x: Layout) -> int:
        """Of a micro batch, on a rank."""
        return x.micro_batch * (self.job.length // x.context)

    def _chunked(
        self, x: Layout, setting: Setting, kept: complex, norm: tuple[complex, ...],
        weights: Weights,
    ) -> Loss:  # fmt: skip
        """Logits of some positions at a time, whose gradients are taken at once (Hsu et al. 2024,
        arXiv:2410.10989): see `rostra.optim.losses.chunked_cross_entropy`."""
        s, each = self.job.sizes, setting.product
        several = self.chunks(x)
        rows: complex = self.chunk if several else setting.tokens
        vocabulary = s.vocabulary / x.tensor
        trains, rank = weights.head_trains, weights.head_rank
        matrix, output = vocabulary * s.hidden, setting.tokens * s.hidden * setting.stream
        learned = matrix if trains else vocabulary * rank  # LoRA's B alone
        thin = setting.tokens * rank * each  # what its A makes of the hidden states
        lies = FLOAT if trains and setting.stream == FLOAT else each
        part = rows * s.hidden * (each if each != setting.stream else 0)
        fused = x.compile and x.tensor == 1  # logits, exponentials and gradients alone
        before: complex = rows * vocabulary * each if several else 0.0  # of the last chunk
        return Loss(
            kept=kept,
            output=output + thin,
            logits=rows * vocabulary * (2 * each + FLOAT if fused else CHUNKED) + part + before,
            gradients=output + thin + learned * FLOAT,
            copies=(matrix * each if lies != each else 0.0) + vocabulary * rank * each,
            product=rows * vocabulary * each + part + learned * each,
            head=learned * FLOAT,
            norm=norm,
            waits=kept + output + thin + learned * FLOAT,
        )


def _straight(one: Place, middle: Place, other: Place) -> bool:
    """Whether what differs between three places of one kind of layer lies on a straight line, so
    that the peak is never in the middle alone."""
    long, short = (x.layers_after - one.layers_after for x in (other, middle))
    return all(
        (b - a) * long == (c - a) * short
        for a, b, c in zip(
            (one.before, one.casts), (middle.before, middle.casts), (other.before, other.casts),
            strict=True,
        )
    )  # fmt: skip
