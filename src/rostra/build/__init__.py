"""From config and layout to a model on its devices, and the engine that trains it: the one
place where loading, attention, precision, sharding, compiling and the optimizer meet."""

from rostra.build.check import check_layout
from rostra.build.engine import build_engine
from rostra.build.model import build_model, check_model
from rostra.build.objective import make_loss

__all__ = ["build_engine", "build_model", "check_layout", "check_model", "make_loss"]
