"""Optimizers, schedules, precision and losses, as plain functions and small classes."""

from rostra.optim.losses import chunked_cross_entropy, cross_entropy_sum
from rostra.optim.low_bit import Part
from rostra.optim.optimizers import Optimizers, make_optimizers
from rostra.optim.precision import LossScale, MasterWeights
from rostra.optim.schedules import Schedule, make_schedule

__all__ = [
    "LossScale",
    "MasterWeights",
    "Optimizers",
    "Part",
    "Schedule",
    "chunked_cross_entropy",
    "cross_entropy_sum",
    "make_optimizers",
    "make_schedule",
]
