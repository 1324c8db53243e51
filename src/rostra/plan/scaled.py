"""The formulas' memory after traces of some layouts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from operator import attrgetter
from statistics import median

from rostra.layout import Layout
from rostra.plan.memory import MemoryModel
from rostra.plan.memory.deepspeed import LIVE
from rostra.plan.results import LASTING, Memory

# What gives the tensors of a layer their shapes; compiled it has the same.
_shape = attrgetter("tensor", "context", "context_method")


class ScaledMemory:
    """A stand-in for `MemoryModel`, which it is until it has learned something.

    A layout that was traced needs what its trace says. Of others, all but what lasts from step to
    step is so many times as much as traces of the same tensors and checkpointing said; in a
    family that no formula knows, where there are none, as those of the same checkpointing; else
    as all of them, in the median.
    """

    def __init__(self, model: MemoryModel) -> None:
        self._model = model
        self._traces: dict[Layout, Memory] = {}
        self._ratios: dict[tuple[str, Hashable], float] = {}  # by checkpointing and shape

    @property
    def known(self) -> bool:
        """Whether formulas know the family."""
        return self._model.source == "formula"

    def taught(self, mode: str) -> bool:
        """Whether a trace has scaled layouts of this checkpointing."""
        return any(mode == known for known, _ in self._ratios)

    def twin(self, layout: Layout) -> Layout:
        """What to trace for `layout`: itself, or, as no trace sees what a compiler keeps, nor
        when a GPU fetches activations from the host, the same without."""
        mode = layout.activation_checkpointing
        mode = "full" if mode == "offload" and self._model.on_gpu else mode
        return replace(layout, compile=False, activation_checkpointing=mode)

    def hides(self, layout: Layout) -> bool:
        """Whether no twin is like the layout either."""
        return moves(layout, self._model.job.sizes.parameters, self._model.on_gpu)

    def traced(self, layout: Layout) -> bool:
        """Whether there is a trace of the layout or its twin."""
        return self.twin(layout) in self._traces

    def like(self, model: MemoryModel) -> ScaledMemory:
        """Another job's, scaled alike, without a trace of its own."""
        other = ScaledMemory(model)
        other._ratios = dict(self._ratios)
        return other

    def keep(self, layout: Layout, trace: Memory) -> Memory:
        """From now on `layout` needs this; gives it with what no trace tells (host, loading,
        saving, what is reserved) as the formulas have it."""
        formula = self._model(layout)
        names = ("host", "nvme", "loading", "loading_host", "saving", "saving_host")
        more = {name: getattr(trace, name) or getattr(formula, name) for name in names}
        reserved = trace.kinds.get("reserved") or formula.kinds.get("reserved", 0)
        trace = replace(trace, kinds={**trace.kinds, "reserved": reserved}, **more)
        self._traces[layout] = trace
        return trace

    def scale(self, layout: Layout) -> None:
        """Scale what is of the shape and checkpointing of a traced layout: of several traces of
        one shape the largest counts."""
        formula, key = _passing(self._model(layout)), _key(layout)
        ratio = _passing(self._traces[layout]) / formula if formula else 1.0
        self._ratios[key] = max(ratio, self._ratios.get(key, 0.0))

    def __call__(self, layout: Layout) -> Memory:
        if self._traces and layout in self._traces:
            return self._traces[layout]
        memory = self._model(layout)
        ratio = self._ratio(layout) if self._ratios else None
        if ratio is None:
            return memory
        kinds = {k: v if k in _KEPT else int(v * ratio) for k, v in memory.kinds.items()}
        return replace(memory, kinds=kinds, source="scaled")

    def _ratio(self, layout: Layout) -> float | None:
        own = _key(layout)
        if own in self._ratios:
            return self._ratios[own]
        if self.known:
            return None
        alike = [ratio for (mode, _), ratio in self._ratios.items() if mode == own[0]]
        return median(alike or self._ratios.values())


def moves(layout: Layout, parameters: int, on_gpu: bool) -> bool:
    """Whether DeepSpeed moves what no trace sees move: what leaves a GPU stays where it is on a
    CPU, which is both device and host, and files on NVMe are no tensors. Of a model of more
    `parameters` than ZeRO-3 gathers at once, those of the few layers of a trace all stay."""
    if layout.engine == "deepspeed" and layout.sharding == "full_shard" and parameters > LIVE:
        return True
    away = {layout.offload_parameters, layout.offload_optimizer} - {"none"}
    return layout.engine == "deepspeed" and ("nvme" in away or bool(on_gpu and away))


def _key(layout: Layout) -> tuple[str, Hashable]:
    return layout.activation_checkpointing, _shape(layout)


_KEPT = (*LASTING, "reserved")


def _passing(memory: Memory) -> int:
    return sum(size for kind, size in memory.kinds.items() if kind not in _KEPT)
