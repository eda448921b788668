"""The backend's own collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Collective, Members


@final
@dataclass(frozen=True, slots=True)
class FlatAllGather(Collective):
    members: Members

    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        if self.members.group.in_order:
            dist.all_gather_single(region, shard, group=self.members.process_group)
        else:
            slices = self.members.slices(region)
            dist.all_gather([slices[s] for s in self.members.group.slots], shard, group=self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class FlatReduceScatter(Collective):
    members: Members

    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        if self.members.group.in_order:
            dist.reduce_scatter_single(shard, region, group=self.members.process_group)
        else:
            slices = self.members.slices(region)
            dist.reduce_scatter(shard, [slices[s] for s in self.members.group.slots], group=self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class FlatAllReduce(Collective):
    members: Members

    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        dist.all_reduce(region, group=self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class FlatMaximum(Collective):
    """All-reduce by maximum: the union of bitmaps."""

    members: Members

    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        dist.all_reduce(region, dist.ReduceOp.MAX, group=self.members.process_group)
