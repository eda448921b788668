"""An order of n things that is computed, not stored: a keyed permutation of range(n).

A Feistel network permutes the numbers of 2h bits, whatever its round function does; what lands at n or above goes
through it again until it falls below ("cycle walking"), which is a permutation of range(n). Each seed and epoch has
its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.uint64]
_ROUNDS = 6


def shuffled(index: NDArray[np.int64], count: int, seed: int, epoch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each `index` in range(count) goes in its `epoch`'s order."""
    key = keys(seed, epoch)
    half = np.uint64(max(1, (max(1, count - 1).bit_length() + 1) // 2))
    out = _permuted(index.astype(np.uint64), key, half)
    while (beyond := np.flatnonzero(out >= count)).size:
        out[beyond] = _permuted(out[beyond], key[beyond], half)
    return out.astype(np.int64)


def keys(seed: int, epoch: NDArray[np.int64]) -> _Numbers:
    """64 bits for each epoch that look unrelated to all others'."""
    return _mixed(_mixed(np.full(epoch.shape, seed % (1 << 64), np.uint64)) ^ epoch.astype(np.uint64))


def _permuted(number: _Numbers, key: _Numbers, half: np.uint64) -> _Numbers:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = number >> half, number & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mixed(right + key + np.uint64(turn << 32)) & mask)
    return (left << half) | right


def _mixed(number: _Numbers) -> _Numbers:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014), with its increment."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
