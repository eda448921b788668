"""What training reads: windows of tokens, each known by its number.

    sample 0, 1, 2, ...  ──>  epoch and place in it  ──>  shuffled within the epoch  ──>  length + 1 tokens

A run's position is one counter of samples. Whoever asks for samples k to k + n gets the same ones: it does not matter
how many ranks ask, or how often a run was stopped and went on.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from towpath.train.data.shards import Mapped
from towpath.train.data.shuffle import keys, shuffled

Batch = tuple[torch.Tensor, torch.Tensor]


class Windows:
    """A stretch of tokens, cut into windows; the targets are the inputs, one token later."""

    def __init__(self, source: Mapped, stretch: range, length: int, seed: int) -> None:
        self.length = length
        self._source = source
        self._stretch = stretch
        self._seed = seed
        self._windows = (len(stretch) - 1) // length

    def __len__(self) -> int:
        """Windows in an epoch."""
        return self._windows

    def batch(self, first: int, count: int) -> Batch:
        """Inputs and targets of samples `first` to `first + count`, int64 [count, length].

        Each epoch visits each window once, in an order of its own, and cuts them at a place of its own, as far as the
        tokens left over at the end of the stretch allow.
        """
        return self.samples(np.arange(first, first + count, dtype=np.int64))

    def samples(self, numbers: NDArray[np.int64]) -> Batch:
        """The same, of the samples with these numbers."""
        epoch, place = np.divmod(numbers, len(self))
        window = shuffled(place, len(self), self._seed, epoch)
        left_over = len(self._stretch) - 1 - len(self) * self.length
        # Another seed than the order's: the two have nothing to do with each other.
        offset = keys(~self._seed, epoch) % np.uint64(left_over + 1)
        return self._gather((window * self.length + offset.astype(np.int64)).tolist())

    def evenly(self, first: int, count: int, total: int) -> Batch:
        """The same, of the windows `first` to `first + count` among `total` that are spread evenly over the stretch.

        They are fixed: for one `total`, all world sizes that divide it read the same windows. Where `total` exceeds
        the windows there are, some come again.
        """
        return self.spread(np.arange(first, first + count, dtype=np.int64), total)

    def spread(self, numbers: NDArray[np.int64], total: int) -> Batch:
        """The same, of the windows with these numbers."""
        return self._gather((numbers * len(self) // total * self.length).tolist())

    def _gather(self, starts: Iterable[int]) -> Batch:
        starts = [self._stretch.start + start for start in starts]
        rows = np.empty((len(starts), self.length + 1), np.int64)
        for row, start in zip(rows, starts, strict=True):
            self._source.read(start, row)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
