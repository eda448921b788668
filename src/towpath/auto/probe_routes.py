"""The routes' collectives, as the engine runs them: on all ranks, in their nodes, across nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from towpath.collectives.collective import GroupRank, WireBuffers, Workspace
from towpath.collectives.rank_transfer import has_group_between_nodes, select
from towpath.core.placement import GroupCollective
from towpath.core.routes import ROUTES, Grid, Group, Op, Route
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Range, Transfer
from towpath.core.transport import Transport
from towpath.planner.profile import route_name
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

Work = Callable[[], None]
_OPS = (Op.ALL_GATHER, Op.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class RouteProbe:
    """`work(size)`: one collective whose region has so many bytes."""

    name: str
    work: Callable[[int], Work]


def route_probes(groups: Groups, topology: Topology, device: torch.device) -> Iterator[RouteProbe]:
    """Every rank must go through all of them in this order: that makes process groups."""
    for mesh, rows in _meshes(topology).items():
        ranks = next(row for row in rows if groups.rank in row)
        nodes = tuple(map(topology.node_of, ranks))
        for route in ROUTES if not Grid.of(nodes).plain else ("flat",):
            group = groups.of(rows, "probe")
            between = group
            if has_group_between_nodes(route, groups.backend(device)):
                between = groups.of(rows, "probe between nodes")
            members = GroupRank(group, between, Group(ranks, tuple(range(len(ranks)))), ranks.index(groups.rank), nodes)
            for op in _OPS:
                work = _collective(op, route, topology, members, groups.backend(device), device)
                yield RouteProbe(route_name(op, route, mesh), work)


def _meshes(topology: Topology) -> dict[str, tuple[tuple[int, ...], ...]]:
    """By name: the groups that run at once."""
    nodes, width = topology.nodes, topology.ranks_per_node
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    if nodes > 1:
        found["all ranks"] = (tuple(range(topology.world)),)
    if width > 1:
        found["in nodes"] = tuple(tuple(range(node * width, (node + 1) * width)) for node in range(nodes))
    if nodes > 1 and width > 1:
        found["across nodes"] = tuple(tuple(range(local, topology.world, width)) for local in range(width))
    return found


def _collective(
    op: Op, route: Route, topology: Topology, members: GroupRank, backend: str, device: torch.device
) -> Callable[[int], Work]:
    def of_size(size: int) -> Work:
        count = len(members.group.ranks)
        numel = max(1, size // 4 // count) * count
        region = torch.zeros(numel, device=device)
        move = GroupCollective(op, 1, (members.group,))
        transfer = Transfer(
            TransferKind.GRAD_SYNC, Range("", "probe", numel, "float32"), move, Transport(route), topology
        )
        collective = select(transfer, members, backend, device)
        shard, workspace = region[slice(*transfer.bounds(members.slot))], Workspace(WireBuffers(device))
        return lambda: collective.run(region, shard, workspace)

    return of_size
