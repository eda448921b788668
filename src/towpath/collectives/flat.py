"""The backend's own collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Collective, Members
from towpath.collectives.workspace import Workspace


def all_gather_single(
    region: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Gather by the name that this PyTorch has for it: the older one warns from 2.13 on."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(region, shard, group=group, async_op=async_op)


def reduce_scatter_single(shard: torch.Tensor, region: torch.Tensor, group: dist.ProcessGroup) -> None:
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, name)(shard, region, group=group)


@final
@dataclass(frozen=True, slots=True)
class FlatAllGather(Collective):
    members: Members

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        if self.members.group.in_order:
            all_gather_single(region, shard, self.members.process_group)
        else:
            slices = region.chunk(len(self.members.group.ranks))
            dist.all_gather([slices[s] for s in self.members.group.slots], shard, group=self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class FlatReduceScatter(Collective):
    members: Members

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        if self.members.group.in_order:
            reduce_scatter_single(shard, region, self.members.process_group)
        else:
            slices = region.chunk(len(self.members.group.ranks))
            dist.reduce_scatter(shard, [slices[s] for s in self.members.group.slots], group=self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class FlatAllReduce(Collective):
    members: Members

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        dist.all_reduce(region, group=self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class FlatMaximum(Collective):
    """All-reduce by maximum: the union of bitmaps."""

    members: Members

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        dist.all_reduce(region, dist.ReduceOp.MAX, group=self.members.process_group)
