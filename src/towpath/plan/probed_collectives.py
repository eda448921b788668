"""The collectives that a probe measures: all that a plan for the topology can use, over every mesh and route.

They run as in a step, through the engine's own collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from towpath.collectives.collective import GroupRank, WireBuffers, Workspace
from towpath.collectives.select import form_for, group_rank, select
from towpath.core.placement import GroupCollective, legal_placements, transitions
from towpath.core.routes import ROUTES, Form, Op, Route
from towpath.core.strategy import WITH_TRANSPORT, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.plan.hardware import GroupMesh
from towpath.plan.profile import collective_name
from towpath.plan.transfer_costs import move_shapes
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

Work = Callable[[], object]

_PURPOSE = "probe"

# Bytes of a group's region.
SIZES = tuple(1 << exponent for exponent in (16, 19, 22, 25, 26))


def planned_collectives(topology: Topology, form: Form) -> dict[tuple[Op, GroupMesh, str], GroupCollective]:
    """Return every collective that a plan can use, by operation, mesh and route: one with the groups of a placement."""
    found: dict[tuple[Op, GroupMesh, str], GroupCollective] = {}
    for placement in legal_placements(topology):
        shapes_by_kind, moves = move_shapes(placement, topology), transitions(placement, topology)
        for kind in WITH_TRANSPORT:
            shapes = shapes_by_kind[kind]
            # The planner tries routes for all collectives of a kind together.
            routes = ROUTES if any(not shape.grid.plain for shape in shapes) else ("flat",)
            for shape, move in zip(shapes, getattr(moves, kind.value), strict=True):
                for route in routes:
                    used = Transport(route).route_on(shape.op, shape.grid, form)
                    found.setdefault((shape.op, GroupMesh(shape.grid, shape.stride), used), move)
    return found


def collectives_to_measure(
    groups: Groups, topology: Topology, device: torch.device
) -> Iterator[tuple[float, list[tuple[str, Callable[[int], Work]]]]]:
    """Yield the collectives of each mesh, and their share of those that are still to come.

    Each has a name, and a function that returns its work for some number of bytes. Meshes inside a node come first,
    because they are fast. Every rank must iterate in the same order, because that creates process groups. They are
    closed before those of the next mesh are made, since each communicator of NCCL holds memory of the device.
    """
    form = form_for(groups.backend(device))

    def group_of(ranks: tuple[tuple[int, ...], ...], purpose: str = "") -> dist.ProcessGroup:
        return groups.of(ranks, _PURPOSE)

    by_mesh: dict[GroupMesh, list[tuple[Op, str, GroupCollective]]] = defaultdict(list)
    for (op, mesh, route), move in planned_collectives(topology, form).items():
        by_mesh[mesh].append((op, route, move))
    left = sum(map(len, by_mesh.values()))
    for mesh, planned in sorted(by_mesh.items(), key=lambda item: item[0].grid.nodes > 1):
        works: list[tuple[str, Callable[[int], Work]]] = []
        for op, route, move in planned:
            payload = Range("", "probe", move.members, "float32")
            transport = Transport(cast(Route, route))
            transfer = Transfer(TransferKind.GRAD_SYNC, payload, move, transport, topology, form=form)
            members = group_rank(transfer, groups.rank, group_of)
            works.append((collective_name(op.value, mesh, route), _collective(transfer, members, device)))
        yield len(planned) / left, works
        left -= len(planned)
        groups.close(_PURPOSE)


def _collective(transfer: Transfer, members: GroupRank, device: torch.device) -> Callable[[int], Work]:
    """Return a function that returns the work of `transfer` with a region of some number of bytes."""

    def of_size(size: int) -> Work:
        count = len(members.group.ranks)
        numel = max(1, size // 4 // count) * count
        region = torch.zeros(numel, device=device)
        sized = replace(transfer, payload=Range("", "probe", numel, "float32"))
        collective = select(sized, members, device)
        shard, workspace = region[slice(*sized.bounds(members.slot))], Workspace(WireBuffers(device))
        return lambda: collective.run(region, shard, workspace)

    return of_size
