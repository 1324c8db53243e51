"""The order of samples: a keyed bijection that needs no memory and no state."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
_WORD = (1 << 64) - 1


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), which wraps modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derive(seed: int, *purpose: int | str) -> int:
    """A seed of 64 bits for a purpose, independent of those for others (SHA-256)."""
    text = json.dumps([seed, *purpose]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


@dataclass(frozen=True)
class Permutation:
    """A bijection of range(size) onto itself, another for every seed and epoch.

    A Feistel network on just enough bits (Luby and Rackoff, 1988; the halves may differ by a
    bit), walked along its cycle until it is inside the range (Black and Rogaway, 2002). The
    range holds more than half of the bits' values, so fewer than two walks are expected.
    """

    seed: int
    epoch: int
    size: int

    @cached_property
    def _keys(self) -> list[np.uint64]:
        state = np.zeros(1, np.uint64)
        for word in (*_words(self.seed), *_words(self.epoch)):
            state = _mix(state + np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(word))
        steps = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return list(_mix(state + steps))

    @overload
    def __call__(self, index: int) -> int: ...
    @overload
    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]: ...

    def __call__(self, index: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        """Where `index` goes; an array goes element by element.

        Raises:
            IndexError: when an index is outside range(size).
        """
        given = np.atleast_1d(np.asarray(index, dtype=np.int64))
        if given.size and (given.min() < 0 or given.max() >= self.size):
            raise IndexError(f"outside range({self.size})")
        image = self._network(given.astype(np.uint64))
        outside = np.flatnonzero(image >= self.size)
        while outside.size:
            image[outside] = self._network(image[outside])
            outside = outside[image[outside] >= self.size]
        return image.astype(np.int64) if isinstance(index, np.ndarray) else int(image[0])

    def _network(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = max(2, (self.size - 1).bit_length())
        low = np.uint64(bits // 2)
        low_mask = np.uint64((1 << (bits // 2)) - 1)
        high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        left, right = x >> low, x & low_mask
        for left_key, right_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            left = left ^ (_mix(right + left_key) & high_mask)
            right = right ^ (_mix(left + right_key) & low_mask)
        return (left << low) | right


def _words(number: int) -> list[int]:
    """A number of any size as words of 64 bits, the lowest first."""
    return [number >> shift & _WORD for shift in range(0, max(1, number.bit_length()), 64)]
