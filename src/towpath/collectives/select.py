"""The choice of the collective that executes a transfer on this rank, and of its process groups.

`CommContext` (`engine/comm.py`) asks once for each transfer, when the model is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist

from towpath.collectives.all_to_all import AllToAllReduceScatter
from towpath.collectives.backend import (
    ColumnRowAllGather,
    EncodedAllGather,
    FlatAllGather,
    FlatAllReduce,
    ReduceThenGather,
    grouped,
    is_direct,
    launched_together,
    of_bytes,
    reduce_scatter_single,
)
from towpath.collectives.collective import Collective, GroupRank, Workspace
from towpath.collectives.exact import AgreedAllGather, ExactAllGather
from towpath.collectives.point_to_point import PointToPoint
from towpath.core.routes import Form, Op, hops_of
from towpath.core.strategy import BY_MAXIMUM, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.errors import ConfigError
from towpath.topology.cluster import RankSets


def form_for(backend: str) -> Form:
    """Return the form of transfers on a backend, such as 'nccl' or 'gloo'."""
    return Form.COLLECTIVES if backend == "nccl" else Form.MESSAGES


def select(transfer: Transfer, members: GroupRank, device: torch.device, start: int = 0, parts: int = 0) -> Collective:
    """Return the collective that executes `transfer` on this rank."""
    # `start`: The elements of the wire buffer that the caller uses itself.
    # `parts`: How many parts collectives cut slices into, if not as many as those of the transfer.
    parts = parts or transfer.parts
    # Bitmaps and sizes. Their maximum is the union, or the largest.
    if transfer.kind in BY_MAXIMUM:
        return FlatAllReduce(members, dist.ReduceOp.MAX)
    op, route, codec = transfer.move.op, transfer.route, transfer.transport.encoding
    if transfer.kind is TransferKind.PARAM_SYNC and transfer.coding is not None:
        agrees = transfer.agrees_on_sizes
        return AgreedAllGather(transfer, members, device) if agrees else ExactAllGather(transfer, members)
    if op is Op.ALL_GATHER and codec is not None:
        encoded = of_bytes(transfer, codec)
        return EncodedAllGather(transfer, members, select(encoded, members, device, encoded.elements), device)
    if op is Op.ALL_REDUCE and route == "flat":
        return FlatAllReduce(members)
    # Collectives of the backend need slices of equal length. In the form of messages, point-to-point messages replace
    # some of them. The reduce-scatter of gloo is an all-reduce inside, and sends twice the bytes. The all-gather of
    # gloo allocates a copy of the region in each call, which fragments the heap.
    in_calls = transfer.form is Form.COLLECTIVES and transfer.elements % transfer.move.members == 0
    if op is not Op.ALL_GATHER and hops_of(route, members.grid):
        reduce = AllToAllReduceScatter(transfer, members, device, transfer.form is Form.COLLECTIVES)
    elif codec is not None:  # a route that was added without its hops would send unencoded values
        raise ConfigError(f"{transfer}: {codec} needs hops, and hops_of() has none for {route!r}.")
    elif not in_calls:
        return PointToPoint(transfer, members)
    elif op is Op.ALL_GATHER:
        return grouped(op, route, members, transfer.elements, device, start, parts)
    else:
        reduce = grouped(Op.REDUCE_SCATTER, route, members, transfer.elements, device, parts=parts)
    if op is Op.REDUCE_SCATTER:
        return reduce
    # An all-reduce of another route is a reduce-scatter and an all-gather, each over the route.
    gather = replace(transfer, move=replace(transfer.move, op=Op.ALL_GATHER))
    own = slice(*transfer.bounds(members.slot))
    return ReduceThenGather(own, reduce, select(gather, members, device, parts=parts))


def group_rank(
    transfer: Transfer, rank: int, group_of: Callable[[RankSets, str], dist.ProcessGroup], first: int = 0
) -> GroupRank:
    """Return the group of `transfer` that `rank` belongs to, with the process groups that execute the transfer."""
    # `group_of`: A function that returns this rank's process group of some sets of ranks, which have every rank once.
    # Its second argument says which part of the transfer's groups they are: '', ' in nodes' or ' between nodes'.
    group = transfer.move.group_of(rank)
    nodes = tuple(map(transfer.topology.node_of, group.ranks))
    position = group.ranks.index(rank)
    everyone = tuple(g.ranks for g in transfer.move.groups)
    if transfer.by_rows_and_columns:
        rows, columns = transfer.partitions
        row, column = group_of(rows, " in nodes"), group_of(columns, " between nodes")
        # Slices of different lengths are sent as messages.
        whole = group_of(everyone, "") if transfer.elements % transfer.move.members else row
        return GroupRank(whole, group, position, nodes, row, column, first)
    whole = group_of(everyone, "")
    each = whole if transfer.form is Form.COLLECTIVES else None
    return GroupRank(whole, group, position, nodes, each, each, first)


# Several all-gathers or reduce-scatters of one group run as one (MiCS, section 4). The time of small ones is mostly
# latency, which is then paid once.


@final
class CoalescedAllGather(Collective):
    """One all-gather for several regions, over one route. Each member has an equal slice of every region.

    Collectives of the backend launch all gathers together. Otherwise a member's slices are sent as one message. They
    are packed into a wire buffer as large as all regions, gathered there, and copied to their regions.
    """

    def __init__(self, gathers: Sequence[Transfer], members: GroupRank, device: torch.device) -> None:
        first, count = gathers[0], len(members.group.ranks)
        assert all(g.route == first.route and g.elements % count == 0 for g in gathers), "not alike, or slices uneven"
        self._members = members
        self._bytes = sum(each.region_bytes for each in gathers)
        # Small gathers are not cut into parts.
        route: Any = "hierarchical" if first.by_rows_and_columns else first.route
        packed = replace(first, payload=Range("", "", self._bytes, "uint8"), transport=Transport(route))
        self._direct = first.form is Form.COLLECTIVES and is_direct(route, members)
        self._gather = select(packed, members, device, 0 if self._direct else self._bytes)

    def run(self, region: Sequence[torch.Tensor], shard: Sequence[torch.Tensor], workspace: Workspace) -> None:
        """Gather `shard[i]` of every member into `region[i]`, for all regions together."""
        # As bytes, so that buckets of several dtypes go as one.
        octets = [each.view(torch.uint8) for each in region]
        mine = [each.view(torch.uint8) for each in shard]
        if self._direct:
            assert isinstance(self._gather, (FlatAllGather, ColumnRowAllGather))
            self._gather.run_all(octets, mine, workspace)
            return
        packed = workspace.take(self._bytes, torch.uint8).view(len(self._members.group.ranks), -1)
        torch.cat(mine, out=packed[self._members.slot])
        self._gather.run(packed.view(-1), packed[self._members.slot], workspace)
        each = [whole.view(len(packed), -1) for whole in octets]  # [slots, bytes of a slice]
        for whole, arrived in zip(each, packed.split([e.shape[1] for e in each], dim=1), strict=True):
            whole.copy_(arrived)


@final
@dataclass(frozen=True, slots=True)
class CoalescedReduceScatter(Collective):
    """Reduce-scatters of the backend over one group, launched together. Members have equal slices of every region."""

    members: GroupRank

    def run(self, region: Sequence[torch.Tensor], shard: Sequence[torch.Tensor], workspace: Workspace) -> None:
        """Sum `region[i]` over all members, and write this member's slice to `shard[i]`, for all regions together."""
        group = self.members.process_group
        with launched_together(group, len(region)):
            for whole, mine in zip(region, shard, strict=True):
                reduce_scatter_single(mine, whole, group)
