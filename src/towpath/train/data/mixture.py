"""Several sources read as one, each in the share of samples that its weight says.

    sample 0, 1, 2, ...  ──>  block of 1000 and place in it  ──>  shuffled within the block  ──>  source, and its sample

Of each block's places a source has as many as its share comes to, and reads its own samples there in turn: each source
has epochs of its own, and a short one comes round more often than a long one. Nothing is counted: like a source alone,
a mixture knows every sample by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from towpath.train.config import MIXED_SAMPLES
from towpath.train.data.shuffle import shuffled
from towpath.train.data.windows import Batch, Windows

_Numbers = NDArray[np.int64]


class Mixture:
    """As `Windows`, of several of them."""

    def __init__(self, sources: Sequence[Windows], weights: Sequence[float], seed: int) -> None:
        self.length = sources[0].length
        self._sources = sources
        self._weights = weights
        self._seed = seed

    def __len__(self) -> int:
        """Windows of all sources; they do not come equally often."""
        return sum(map(len, self._sources))

    def batch(self, first: int, count: int) -> Batch:
        """Inputs and targets of samples `first` to `first + count`, int64 [count, length]."""
        block, place = np.divmod(np.arange(first, first + count, dtype=np.int64), MIXED_SAMPLES)
        counts = samples_of_each(self._weights, MIXED_SAMPLES)
        source, place = _owner(shuffled(place, MIXED_SAMPLES, self._seed, block), counts)
        return self._from_each(
            source, block * counts[source] + place, lambda s, numbers: self._sources[s].samples(numbers)
        )

    def evenly(self, first: int, count: int, total: int) -> Batch:
        """The same, of the windows `first` to `first + count` among `total` that are shared out by the weights, each
        source's spread evenly over it."""
        counts = samples_of_each(self._weights, total)
        source, place = _owner(np.arange(first, first + count, dtype=np.int64), counts)
        return self._from_each(source, place, lambda s, numbers: self._sources[s].spread(numbers, int(counts[s])))

    def _from_each(self, source: _Numbers, numbers: _Numbers, read: Callable[[int, _Numbers], Batch]) -> Batch:
        inputs, targets = (torch.empty(len(source), self.length, dtype=torch.int64) for _ in range(2))
        for index in range(len(self._sources)):
            rows = np.flatnonzero(source == index)
            if rows.size:
                inputs[rows], targets[rows] = read(index, numbers[rows])
        return inputs, targets


def samples_of_each(weights: Sequence[float], total: int) -> _Numbers:
    """`total` shared out by `weights`, as whole numbers: what is left over goes to the largest remainders."""
    exact = np.asarray(weights, np.float64) / np.sum(weights) * total
    counts = np.floor(exact + 1e-9).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")
    counts[largest[: total - counts.sum()]] += 1
    return counts


def _owner(places: _Numbers, counts: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Which source each place belongs to, and which of its own places it is."""
    ends = np.cumsum(counts)
    source = np.searchsorted(ends, places, side="right")
    return source, places - (ends - counts)[source]
