"""Training: the step, the loop, and a run from its config to its final model."""

from rostra.train.feeding import total_steps
from rostra.train.origin import Origin
from rostra.train.run import train
from rostra.train.step import Outcome, train_step

__all__ = ["Origin", "Outcome", "total_steps", "train", "train_step"]
