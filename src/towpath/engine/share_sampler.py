"""`ShareSampler`: which samples of a dataset each rank takes, where ranks take unequal batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import Sampler

from towpath.engine.executor import engine_of
from towpath.errors import ShardError


@final
class ShareSampler(Sampler[list[int]]):
    """The numbers of this rank's samples, one micro-batch after the other: a `batch_sampler` for PyTorch's DataLoader.

        sampler = towpath.ShareSampler(model, len(dataset), micro_batch=8)
        loader = DataLoader(dataset, batch_sampler=sampler)

    Each rank takes as many rows of a micro-batch as the strategy's `shares` say. A loop over it is an epoch, with an
    order of its own. What does not fill a last micro-batch of all ranks is left out.

    Its state is one number, the samples that all ranks have taken. So a run may resume with other shares, or on other
    ranks, and no sample comes twice. Save it with `towpath.checkpoint.State(model, optimizer, data=sampler)`. A
    DataLoader with workers takes batches ahead: save torchdata's StatefulDataLoader in its place.

    Args:
        model: A model that `shard` returned, with a strategy that has `shares`.
        samples: The number of samples of the dataset.
        micro_batch: The rows of a micro-batch, as the mean over all ranks. A fast rank takes more, in its own memory.
        shuffle: Whether each epoch has an order of its own. Default: True.
        seed: The seed of these orders. Default: 0.

    Raises:
        ShardError: The model is not sharded, or its strategy has no shares, or the dataset is smaller than a
            micro-batch of all ranks.
        ConfigError: The micro-batch is too small to give each rank a row, or another sampler of this model has another
            `micro_batch`.
    """

    def __init__(
        self, model: nn.Module, samples: int, micro_batch: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        engine = engine_of(model)
        if engine.shares is None:
            raise ShardError(
                "ShareSampler: the strategy has no shares. Pass them to it, as in towpath.strategy(name, "
                "shares='auto'), or take PyTorch's DistributedSampler."
            )
        if engine.outer is not None and engine.outer.plan.settings.meet:
            raise ShardError(
                "ShareSampler: islands that come and go would all read the same samples. Take those that "
                "towpath.meet_islands(model).position(step) names."
            )
        self._shares, self._samples, self._shuffle, self._seed = engine.shares, samples, shuffle, seed
        self._at_once = engine.shares.divide(micro_batch)
        if samples < self._at_once:
            raise ShardError(
                f"ShareSampler: a dataset of {samples} samples, and a micro-batch of all ranks has {self._at_once}. "
                "Take a smaller micro-batch."
            )
        self._taken = 0  # samples of all ranks

    def __len__(self) -> int:
        """Return how many micro-batches are left of the epoch."""
        left = self._left
        return (left if left >= self._at_once else self._samples) // self._at_once

    def __iter__(self) -> Iterator[list[int]]:
        self._leave_out_rest()
        epoch, place = divmod(self._taken, self._samples)
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order = torch.randperm(self._samples, generator=generator) if self._shuffle else torch.arange(self._samples)
        while place + self._at_once <= self._samples:
            begin, rows = self._shares.span(self._shares.drawn)
            first = place + begin
            place += self._at_once
            self._shares.drawn += 1
            self._taken += self._at_once
            yield order[first : first + rows].tolist()
        self._leave_out_rest()

    @property
    def _left(self) -> int:
        return self._samples - self._taken % self._samples

    def _leave_out_rest(self) -> None:
        if self._left < self._at_once:
            self._taken += self._left

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, for a checkpoint."""
        return {"samples": self._taken}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at the position of a checkpoint.

        Args:
            state_dict: What `state_dict` returned.
        """
        self._taken = int(state_dict["samples"])
