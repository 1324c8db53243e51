"""Layouts into running engines: the engines, and the transforms they are made with."""

from rostra.parallel.engine import Engine
from rostra.parallel.held import Gradients, Held
from rostra.parallel.mesh import Mesh
from rostra.parallel.stage import Inputs, Loss, Stage
from rostra.parallel.torch_engine import Accumulate, Execute, TorchEngine

__all__ = [
    "Accumulate",
    "Engine",
    "Execute",
    "Gradients",
    "Held",
    "Inputs",
    "Loss",
    "Mesh",
    "Stage",
    "TorchEngine",
]
