"""One optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rostra.batch import Batch
from rostra.parallel import Engine


@dataclass(frozen=True)
class Outcome:
    """What a step did. `loss` is in nats a target token of the global batch, `tokens` their
    number (by their weights, if any); a step that is not `accepted` left the model as it was."""

    loss: float
    tokens: float
    gradient_norm: float
    learning_rate: float
    accepted: bool


def train_step(engine: Engine, batch: Batch) -> Outcome:
    """Gradients of the global batch, and an update unless they are not finite."""
    total, weight = engine.forward_backward(batch)
    norm = engine.gradient_norm()
    loss = total / (weight or 1)
    accepted = weight > 0 and math.isfinite(loss) and math.isfinite(norm)
    rate = engine.step(accepted)
    return Outcome(loss, weight, norm, rate, accepted)
