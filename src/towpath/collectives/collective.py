"""What every collective is: one move of the schedule, run by this rank among its group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist

from towpath.spec.routes import Group


@dataclass(frozen=True, slots=True)
class Members:
    """The group a collective runs in, and this rank's position in it."""

    process_group: dist.ProcessGroup
    group: Group
    position: int

    @property
    def slot(self) -> int:
        """The slice of the region that this rank holds."""
        return self.group.slots[self.position]

    def slices(self, region: torch.Tensor) -> list[torch.Tensor]:
        """The region's slices, by slot; equal ones, but for an all-reduce of a length that does not divide."""
        return list(region.tensor_split(len(self.group.ranks)))


class Scratch:
    """Wire buffers of one lane, which runs one transfer at a time: one per dtype, as large as was ever needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self.made = 0

    @torch.inference_mode(False)  # what is made in inference mode could never be trained with
    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
            self.made += 1
        return buffer[:numel]

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers.values())


class Collective(ABC):
    """Runs on a *region*, a contiguous 1-D tensor with one slice per member; `shard` is this rank's slice.

    all-gather: `shard` → every slice of `region`. reduce-scatter: the sum over members of their `region`
    → `shard`; the rest of `region` is left undefined. all-reduce: the sum → `region`, whole.
    `shard` may be this rank's own slice of `region`.
    """

    @abstractmethod
    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        """Complete the collective in the order of the current stream (on a CPU: before it returns)."""
