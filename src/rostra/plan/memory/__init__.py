"""Memory of any layout by closed formulas, for any hardware: no model is built."""

from rostra.plan.memory.model import MemoryModel

__all__ = ["MemoryModel"]
