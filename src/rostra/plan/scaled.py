"""Memory of families whose operations no formula knows, after traces of some of their layouts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from operator import attrgetter
from statistics import median

from rostra.layout import Layout
from rostra.plan.memory import MemoryModel
from rostra.plan.results import LASTING, Memory

# What gives the tensors of a layer their shapes.
_shape = attrgetter("tensor", "context", "context_method", "compile")


class ScaledMemory:
    """The formulas' memory, in which all but what lasts from step to step is so many times as
    much as traces of the same tensors and checkpointing said; where there are none, as those of
    the same checkpointing; else as all of them, in the median.

    A stand-in for `MemoryModel`, which it is until it has learned something.
    """

    def __init__(self, model: MemoryModel) -> None:
        self._model = model
        self._ratios: dict[tuple[str, Hashable], float] = {}  # by checkpointing and shape

    @property
    def known(self) -> bool:
        """Whether formulas know the family, so that nothing is to be learned."""
        return self._model.source == "formula"

    def learned(self, layout: Layout) -> bool:
        return _key(layout) in self._ratios

    def learn(self, layout: Layout, trace: Memory) -> None:
        """From the trace of a layout."""
        formula = _passing(self._model(layout))
        self._ratios[_key(layout)] = _passing(trace) / formula if formula else 1.0

    def __call__(self, layout: Layout) -> Memory:
        memory = self._model(layout)
        if not self._ratios:
            return memory
        ratio = self._ratio(layout)
        kinds = {k: v if k in _KEPT else int(v * ratio) for k, v in memory.kinds.items()}
        return replace(memory, kinds=kinds, source="scaled")

    def _ratio(self, layout: Layout) -> float:
        own = _key(layout)
        if own in self._ratios:
            return self._ratios[own]
        alike = [ratio for (mode, _), ratio in self._ratios.items() if mode == own[0]]
        return median(alike or self._ratios.values())


def _key(layout: Layout) -> tuple[str, Hashable]:
    return layout.activation_checkpointing, _shape(layout)


_KEPT = (*LASTING, "reserved")


def _passing(memory: Memory) -> int:
    return sum(size for kind, size in memory.kinds.items() if kind not in _KEPT)
