"""Several gathers of one group at the price of one (MiCS, section 4): the small ones are all waiting, no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Binding, Members
from towpath.collectives.flat import all_gather_single
from towpath.collectives.select import bind
from towpath.collectives.workspace import Workspace
from towpath.core.routes import Op, travelled
from towpath.errors import StepError


@final
class CoalescedAllGather:
    """Gathers for all of `bindings` at once, over one route; each member has an equal slice of every region.

    NCCL launches its own gathers as one. Elsewhere, and on other routes, the slices of a member travel as one message:
    they are packed, gathered, and unpacked to where they belong, through a wire buffer as large as all the regions.
    """

    def __init__(self, bindings: Sequence[Binding], members: Members, backend: str, device: torch.device) -> None:
        count, route = len(members.group.ranks), bindings[0].route
        for each in bindings:
            if each.op is not Op.ALL_GATHER or each.route != route or each.elements % count:
                raise StepError(
                    f"rank {members.rank}: {each.label}: got {each.op.value} by {each.route} of {each.elements} "
                    f"elements, expected an all-gather by {route} of equal slices for {count} ranks, as the others "
                    "that it is coalesced with. Run it by itself."
                )
        self._bindings, self._members = bindings, members
        self._bytes = sum(b.elements * b.dtype.itemsize for b in bindings)
        packed = Binding(Op.ALL_GATHER, route, self._bytes, torch.uint8, f"{len(bindings)} gathers in one")
        as_one_launch = backend == "nccl" and travelled(route, members.grid) == "flat" and members.group.in_order
        self._gather = None if as_one_launch else bind(packed, members, backend, device)

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        for binding, region, shard in zip(self._bindings, regions, shards, strict=True):
            binding.check_fit(region, shard, self._members)
        if self._gather is None:
            group = self._members.process_group
            with dist.distributed_c10d._coalescing_manager(group):  # pyright: ignore[reportPrivateUsage]
                for region, shard in zip(regions, shards, strict=True):
                    all_gather_single(region, shard, group)
            return
        packed = workspace.take(self._bytes, torch.uint8).view(len(self._members.group.ranks), -1)
        mine = packed[self._members.slot]
        torch.cat([shard.view(torch.uint8) for shard in shards], out=mine)
        self._gather.run(packed.view(-1), mine, workspace)
        each = [region.view(torch.uint8).view(len(packed), -1) for region in regions]  # [slots, bytes of a slice]
        for whole, arrived in zip(each, packed.split([e.shape[1] for e in each], dim=1), strict=True):
            whole.copy_(arrived)
