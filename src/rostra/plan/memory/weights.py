"""What of a model lies on a rank from step to step, matrix by matrix: parameters, what trains of
them, the states of the optimizer, and what they are when they are gathered.

Full training with AdamW in float32 holds 16 bytes a parameter: weight, gradient and two moments
of 4 each (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1, which counts 16-bit
weights and gradients beside a float32 copy: the same 16).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Literal, cast

from rostra.adapt.quantized_format import Format, Kind
from rostra.config.schema import OptimizerSection
from rostra.layout import OptimizerStates
from rostra.models.experts import experts_of
from rostra.optim.low_bit import FORMATS, SMALLEST
from rostra.parallel.replicated import BUCKET_BYTES
from rostra.plan.job import Cut, Job, Layer, Linear
from rostra.plan.memory.setting import ATTENTION, Adapted

FLOAT = 4
HALF = {"bf16": 2, "fp16": 2, "fp8": 2, "bf16_pure": 2}  # bytes of a number in products


@dataclass(frozen=True)
class Matrix:
    """A parameter [rows, columns]. A quantised one has `packed` bytes in place of its numbers,
    and scales."""

    rows: int
    columns: int
    each: int = FLOAT  # bytes of a number where it lies
    trains: bool = True
    cut: Cut = "whole"
    packed: int = 0
    scales: int = 0
    embeds: bool = False  # an input or output embedding

    def part(self, tensor: int, shards: int) -> tuple[float, float]:
        """Numbers that a tensor rank has, and what the fullest of its shards has of them: rows
        are dealt out in runs of equal length, the last ones padded (Zhao et al. 2023,
        arXiv:2304.11277, section 3.2.1, here by FSDP2's rows)."""
        rows, columns = self.rows, self.columns
        if self.cut == "columns":
            rows = ceil(rows / tensor)
        elif self.cut == "rows":
            columns = ceil(columns / tensor)
        return rows * columns, ceil(rows / shards) * columns


@dataclass(frozen=True)
class Unit:
    """Bytes of some matrices, on one tensor rank: whole, in the fullest shard, and gathered from
    all shards; numbers that train likewise."""

    whole: float = 0.0
    part: float = 0.0
    gathered: float = 0.0
    scales: float = 0.0  # within `whole`, of quantised weights
    scales_part: float = 0.0
    trained: float = 0.0  # numbers
    trained_part: float = 0.0
    trained_gathered: float = 0.0  # padded
    states: float = 0.0  # bytes of the optimizer's for `trained`
    states_part: float = 0.0
    pinned: float = 0.0  # what `part` takes in pinned memory, and so what trains of it in float32
    trained_pinned: float = 0.0
    largest: float = 0.0  # numbers of the largest matrix that trains, in its shard

    def __add__(self, other: Unit) -> Unit:
        sums = {k: v + getattr(other, k) for k, v in vars(self).items()}
        return Unit(**{**sums, "largest": max(self.largest, other.largest)})

    def times(self, count: int) -> Unit:
        return Unit(**{k: v if k == "largest" else v * count for k, v in vars(self).items()})


def unit_of(
    matrices: Iterable[Matrix],
    tensor: int,
    shards: int,
    gathered_as: int | None,
    section: OptimizerSection,
    states: OptimizerStates,
) -> Unit:
    """The unit of `matrices`; gathered ones are numbers of `gathered_as` bytes, or as they lie."""
    total = Unit()
    for m in matrices:
        numbers, part = m.part(tensor, shards)
        if m.packed:
            bytes_, share = m.packed + m.scales, ceil(m.rows / shards) / m.rows
            total += Unit(
                whole=bytes_, part=bytes_ * share, gathered=bytes_,
                scales=m.scales, scales_part=m.scales * share,
                pinned=pinned(m.packed * share) + pinned(m.scales * share),
            )  # fmt: skip
            continue
        padded = part * shards
        each = m.each if gathered_as is None else min(m.each, gathered_as)
        trains = float(m.trains)
        per = state_bytes(m, numbers, section, states) * trains
        total += Unit(
            whole=numbers * m.each,
            part=part * m.each,
            gathered=padded * each,
            trained=numbers * trains,
            trained_part=part * trains,
            trained_gathered=padded * trains,
            states=numbers * per,
            states_part=part * per,
            pinned=pinned(part * m.each),
            trained_pinned=pinned(FLOAT * part * trains),
            largest=part * trains,
        )
    return total


def pinned(size: float) -> float:
    """Bytes of the host that `size` bytes of a pinned tensor take: PyTorch rounds them up to a
    power of two (`torch.cuda.host_memory_stats`)."""
    return float(1 << (int(size) - 1).bit_length()) if size >= 1 else 0.0


def under_way(matrices: Iterable[Matrix], tensor: int) -> float:
    """Numbers of the two largest neighbours among the buckets in which gradients of `matrices`,
    in the model's order, travel: DDP's, filled from the last parameter on (Li et al. 2020,
    arXiv:2006.15704, section 4.2)."""
    buckets = [0.0]
    for matrix in reversed([m for m in matrices if m.trains]):
        if FLOAT * buckets[-1] >= BUCKET_BYTES:
            buckets.append(0.0)
        buckets[-1] += matrix.part(tensor, 1)[0]
    return max((one + other for one, other in pairwise(buckets)), default=buckets[0])


def state_bytes(
    m: Matrix, numbers: float, section: OptimizerSection, states: OptimizerStates
) -> float:
    """Bytes of the optimizer's states for a number of `m`.

    AdamW: two moments of 4 (Kingma & Ba 2015, arXiv:1412.6980); momentum (SGD, Lion: Chen et al.
    2023, arXiv:2302.06675; Muon, for matrices between hidden spaces): one; Adafactor: a row and
    a column (Shazeer & Stern 2018, arXiv:1804.04235). In 8 bits a moment takes one and a scale
    of 4 for a block (Dettmers et al. 2022, arXiv:2110.02861), in 4 bits half one (Li et al. 2023,
    arXiv:2309.01507).
    """
    matrix = m.rows > 1 and m.columns > 1
    if states != "fp32":
        kind = "int8" if states == "paged_int8" else states
        block = FORMATS[kind].block
        if numbers < SMALLEST or numbers % block:
            return 2.0 * FLOAT
        return 2.0 * ((0.5 if kind == "int4" else 1.0) + FLOAT / block)
    if section.name == "adamw" or (section.name == "muon" and (m.embeds or not matrix)):
        return 2.0 * FLOAT
    if section.name == "adafactor":
        return FLOAT * (1 / m.rows + 1 / m.columns) if matrix else FLOAT
    if section.name == "sgd" and not section.momentum:
        return 0.0
    return FLOAT


class Weights:
    """The matrices of a job under a layout's quantisation and adapter."""

    def __init__(self, job: Job, quantization: str, adapter: str, half: int) -> None:
        self.job, self.config = job, job.config
        self.quantization, self.adapter = quantization, adapter
        self.frozen = adapter != "none"
        self.half = half  # bytes of a frozen number that is only multiplied

    @property
    def _lies(self) -> int:
        """Bytes of a number that is only ever multiplied."""
        return self.half if self.frozen else FLOAT

    def layer(self, layer: Layer) -> list[Matrix]:
        s, found = self.job.sizes, []
        adapted = self.adapted(layer)
        for x in layer.linears:
            found.append(self._linear(x))
            if x.bias:
                found.append(Matrix(x.outputs, 1, self._bias, not self.frozen, _bias_cut(x.cut)))
            if x.name in adapted.names:
                found += self._beside(x, adapted)
        found += self._norms(layer.other)
        if self.adapter == "prefix":
            count = self.config.adapter.virtual_tokens
            found.append(Matrix(s.kv_heads, 2 * count * s.head_size))
        return found

    @property
    def _bias(self) -> int:
        return FLOAT

    def _norms(self, numbers: int) -> list[Matrix]:
        """What is neither matrix nor attention, as vectors of the hidden size."""
        hidden = self.job.sizes.hidden
        whole, rest = divmod(numbers, hidden)
        vectors = [Matrix(hidden, 1, FLOAT, not self.frozen)] * min(whole, 8)
        left = numbers - len(vectors) * hidden
        if left > 0 and whole > 8:  # fused experts: many rows
            each = self._lies if experts_of(self.job.shape)[0] else FLOAT
            vectors.append(Matrix(ceil(left / hidden), hidden, each, not self.frozen))
        elif rest:
            vectors.append(Matrix(rest, 1, FLOAT, not self.frozen))
        return vectors

    def _linear(self, x: Linear) -> Matrix:
        if x.name not in self.quantized(x):
            return Matrix(x.outputs, x.inputs, self._lies, not self.frozen, x.cut)
        form = Format(
            cast(Kind, self.quantization), self.config.quantization.double, (x.outputs, x.inputs)
        )
        sizes = {name: _bytes(*spec) for name, spec in form.tensors().items()}
        packed = sizes.pop("packed")
        return Matrix(x.outputs, x.inputs, 1, False, x.cut, packed, sum(sizes.values()))

    def quantized(self, x: Linear) -> tuple[str, ...]:
        """The linear's name, if it is quantised."""
        if self.quantization == "none":
            return ()
        skipped = any(f".{x.name}".endswith(f".{s}") for s in self.config.quantization.skip)
        return () if skipped else (x.name,)

    def adapted(self, layer: Layer) -> Adapted:
        table = self.config.adapter
        if self.adapter not in ("lora", "ia3"):
            return Adapted(cast(Literal["none", "prompt", "prefix"], self.adapter))
        names = [x.name for x in layer.linears]
        if table.targets is None and self.adapter == "ia3":
            chosen = _of_ia3(layer)
        elif table.all_linear:
            chosen = names
        else:
            chosen = [n for n in names if table.aims_at(f"model.layers.0.{n}")]
        kind: Literal["lora", "ia3"] = "lora" if self.adapter == "lora" else "ia3"
        return Adapted(kind, frozenset(chosen), table.rank, table.dora)

    def _beside(self, x: Linear, adapted: Adapted) -> list[Matrix]:
        """What an adapter has beside a linear: LoRA's A and B (Hu et al. 2021, arXiv:2106.09685)
        with DoRA's magnitudes (Liu et al. 2024, arXiv:2402.09353), or (IA)³'s scales (Liu et al.
        2022, arXiv:2205.05638)."""
        if adapted.kind == "ia3":
            inside = not any(part in x.name for part in ATTENTION)
            return [Matrix(x.inputs if inside else x.outputs, 1)]
        found = [Matrix(adapted.rank, x.inputs), Matrix(x.outputs, adapted.rank)]
        return [*found, Matrix(x.outputs, 1)] if adapted.dora else found

    def embedding(self) -> list[Matrix]:
        """The token embedding and what else comes before the layers."""
        s, saved = self.job.sizes, self.config.adapter.modules_to_save
        trains = not self.frozen or any("embed" in m or "wte" in m for m in saved)
        computes = s.family.startswith("gemma")  # scales its rows, so it stays as it is
        each = FLOAT if trains or computes else self._lies
        found = [Matrix(s.vocabulary, s.hidden, each, trains, "columns", embeds=True)]
        if s.before:
            rows = ceil(s.before / s.hidden)
            found.append(Matrix(rows, s.hidden, self._lies, not self.frozen))
        if self.adapter == "prompt":
            found.append(Matrix(self.config.adapter.virtual_tokens, s.hidden))
        if self.job.ends_adapted[0] and self.adapter == "lora":
            found += _pair(s.hidden, self.config.adapter.rank, s.vocabulary)
        return found

    def head(self) -> list[Matrix]:
        """The matrix of the output."""
        s, saved = self.job.sizes, self.config.adapter.modules_to_save
        trains = not self.frozen or any("head" in m or "embed_out" in m for m in saved)
        each = FLOAT if trains else self._lies
        return [Matrix(s.vocabulary, s.hidden, each, trains, "columns", embeds=True)]

    def after(self) -> list[Matrix]:
        """Norms after the layers, and what LoRA has around the head."""
        s, found = self.job.sizes, self._norms(self.job.sizes.after)
        return [*found, *_pair(s.vocabulary, self.head_rank, s.hidden)]

    @property
    def head_rank(self) -> int:
        """LoRA's rank around the head; 0 without."""
        aimed = self.job.ends_adapted[1] and self.adapter == "lora"
        return self.config.adapter.rank if aimed else 0

    @cached_property
    def head_trains(self) -> bool:
        matrices = self.embedding()[:1] if self.job.sizes.tied else self.head()
        return matrices[0].trains


def _of_ia3(layer: Layer) -> list[str]:
    """Keys, values and the last of the MLP, as peft chooses for the families it knows."""
    inside = [x.name for x in layer.linears if any(p in x.name for p in ATTENTION)]
    chosen = [n for n in inside if n.rpartition(".")[2] in ("k_proj", "v_proj", "c_attn")]
    outside = [x.name for x in layer.linears if x.name not in inside]
    return [*chosen, *outside[-1:]]


def _pair(outputs: int, rank: int, inputs: int) -> list[Matrix]:
    """LoRA's factors around an embedding or a head."""
    factors = (rank, inputs), (outputs, rank)
    return [Matrix(*shape, embeds=True) for shape in factors] if rank else []


def _bias_cut(cut: Cut) -> Cut:
    return "columns" if cut == "columns" else "whole"


def _bytes(shape: tuple[int, ...], dtype: object) -> int:
    import torch

    assert isinstance(dtype, torch.dtype)
    numbers = 1
    for size in shape:
        numbers *= size
    return numbers * dtype.itemsize
