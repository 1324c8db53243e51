"""Layouts into running engines: the engines, and the transforms they are made with."""

from rostra.parallel.engine import Engine
from rostra.parallel.torch_engine import Loss, TorchEngine

__all__ = ["Engine", "Loss", "TorchEngine"]
