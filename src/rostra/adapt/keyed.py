"""Random numbers that depend on what they are for, and not on who draws them.

A number is a hash of the seed, the step, the sample, the position in it, and the feature; so all
layouts draw the same, in whatever order and however often they come to it. A sample is known by
its tokens: two equal samples of one step share their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rostra.batch import Batch

# From a micro batch: what the model is called with, and what goes with it.
Inputs = Callable[[Batch], tuple[dict[str, Any], Any]]
Part = Callable[[Tensor], Tensor]  # of a tensor of all positions [b, T], this rank's

# Splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def mixed(x: Tensor) -> Tensor:
    """A hash of each number of `x`, int64, all of whose bits are alike random."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted to the right, filled with zeros: torch fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def counted(keys: Tensor, count: Tensor) -> Tensor:
    """A hash of each of `keys` and of a number beside it."""
    return mixed(keys + (count + 1) * _STEP)


def uniform(hashes: Tensor) -> Tensor:
    """Numbers from -1 to 1 in float32, on a grid of 2^-23."""
    return (hashes & 0xFFFFFF).float() * 2**-23 - 1


@dataclass
class Keys:
    """Gives each position of a step's samples its key. `step` is set before every step."""

    seed: int
    step: int = 0

    def positions(self, input_ids: Tensor) -> Tensor:
        """Keys int64 [samples, T] of whole samples [samples, T]."""
        at = torch.arange(input_ids.shape[1], device=input_ids.device)
        seed, step = torch.tensor([self.seed, self.step], device=input_ids.device)
        run = counted(mixed(seed), step)
        samples = mixed(run + counted(input_ids, at).sum(1, keepdim=True))
        return counted(samples, at)
