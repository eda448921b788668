"""Our ring as FSDP2's reduce-scatter, by its public `set_custom_reduce_scatter`.

Gloo's own reduce-scatter is an all-reduce inside and sends twice the bytes. With this one FSDP2 sends what it would on
a backend without that flaw, and a race against it says nothing about the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

# FSDP2's documentation names this module as the interface's home; it is exported nowhere else (torch 2.13).
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from towpath.collectives.collective import Collective, GroupRank, WireBuffers, Workspace
from towpath.collectives.rank_transfer import select
from towpath.core.placement import GroupCollective
from towpath.core.routes import Group, Op
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Range, Transfer
from towpath.core.transport import Transport
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups


def use_ring(model: FSDPModule, topology: Topology) -> None:
    """In every FSDP module of `model`. Sums and divides itself: gloo has no mean."""
    ring = RingReduceScatter(topology)
    for module in (model, *(m for m in _modules(model) if isinstance(m, FSDPModule))):
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(ring)


def _modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if module is not model]


@final
class RingReduceScatter(ReduceScatter):
    """One ring for each size, dtype and group that comes; the memory they receive in is shared."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._rings: dict[tuple[str, int, torch.dtype], tuple[Collective, Workspace]] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """The sum; complete when this returns, and on a GPU in the order of its stream."""
        assert op == dist.ReduceOp.SUM and not async_op, (op, async_op)
        ring, workspace = self._ring(group, input_tensor)
        ring.run(input_tensor, output_tensor, workspace)

    def _ring(self, group: dist.ProcessGroup, region: torch.Tensor) -> tuple[Collective, Workspace]:
        key = (group.group_name, region.numel(), region.dtype)
        if key not in self._rings:
            ranks = tuple(dist.get_process_group_ranks(group))
            members = GroupRank(
                group,
                group,
                Group(ranks, tuple(range(len(ranks)))),
                dist.get_rank(group),
                tuple(map(self._topology.node_of, ranks)),
            )
            move = GroupCollective(Op.REDUCE_SCATTER, 1, (members.group,))
            payload = Range("", "FSDP2", region.numel(), str(region.dtype).removeprefix("torch."))
            transfer = Transfer(TransferKind.REDUCE, payload, move, Transport("ring"), self._topology)
            ring = select(transfer, members, Groups(group).backend(region.device), region.device)
            self._rings[key] = ring, Workspace(WireBuffers(region.device))
        return self._rings[key]
