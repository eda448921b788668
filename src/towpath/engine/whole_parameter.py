"""A parameter as the modules compute with it: whole, in memory that the engine gives it and takes again."""

from __future__ import annotations

import torch
from torch import nn

from towpath.errors import ShardTensorError


class WholeParameter(nn.Parameter):
    """A parameter whose `.data` counts writes.

    A plain tensor's `.data` has a version of its own: what is written through it leaves no trace.
    """

    @property
    def data(self) -> torch.Tensor:
        """An alias outside autograd, with the same version."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Write the values into the memory that it has. Shape, dtype and device stay: the memory is the engine's."""
        mine, theirs = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (self, value))
        if mine != theirs:
            raise ShardTensorError(
                f"got {theirs} for a parameter of {mine}: a sharded model cannot be cast or moved. Do it before "
                "shard(); precision= sets what computes and travels."
            )
        with torch.no_grad():
            self.copy_(value)


def live_in(view: nn.Parameter, memory: torch.Tensor) -> None:
    """Let `view` be what lies in `memory`. Its version stays: to autograd, a gather is no write."""
    torch.Tensor.data.__set__(view, memory)  # pyright: ignore
