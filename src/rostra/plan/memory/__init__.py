"""Memory of any layout by closed formulas, for any hardware: no model is built."""

from rostra.plan.conventions import ROSTRA, TORCHTITAN, Conventions
from rostra.plan.memory.allocator import outside
from rostra.plan.memory.model import MemoryModel

__all__ = ["ROSTRA", "TORCHTITAN", "Conventions", "MemoryModel", "outside"]
