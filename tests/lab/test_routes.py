"""What the kernel counted on each node's cable is what the plan of each route said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lab import Lab
from tests.lab.test_bytes import ABOVE, BELOW, counters_at_rest
from tests.workspace import workspace
from towpath.collectives.select import group_rank, select
from towpath.core import routes
from towpath.core.placement import GroupCollective
from towpath.core.routes import ROUTES, Form, Group, Op
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

SHAPE = Topology(2, 4)


def carried(rank: int, world: int, op: Op, route: str, elements: int, form: Form) -> tuple[int, int]:
    """Bytes this node sent over its cable in one collective: by the kernel, and by the plan."""
    everyone = tuple(range(world))
    transfer = Transfer(
        TransferKind.GRAD_SYNC,
        Range("", "", elements, "float32"),
        GroupCollective(op, 1, (Group(everyone, everyone),)),
        Transport(route),
        SHAPE,
        form=form,
    )
    routes.SMALLEST_PART_BYTES_IN_CALLS = 1 << 16  # slices have 512 KiB
    groups = Groups()
    members = group_rank(transfer, rank, groups.of)
    collective = select(transfer, members, torch.device("cpu"))
    region = torch.ones(elements)
    shard = region.chunk(world)[rank]
    collective.run(region, shard, workspace())  # members compare what they mean, once
    before = counters_at_rest()
    collective.run(region, shard, workspace())
    return counters_at_rest() - before, transfer.cable_bytes(SHAPE.node_of(rank))


CASES = [(op, route, Form.MESSAGES) for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) for route in ROUTES]
# A reduce-scatter of gloo is an all-reduce inside, unlike that of NCCL.
CASES += [(Op.ALL_GATHER, route, Form.COLLECTIVES) for route in ("flat", "hierarchical", "ho-ring")]
CASES += [(Op.REDUCE_SCATTER, route, Form.COLLECTIVES) for route in ("one-hop", "two-hop")]


@pytest.mark.parametrize(("op", "route", "form"), CASES)
def test_each_cable_carries_the_plans_bytes(lab: Callable[..., Lab], op: Op, route: str, form: Form) -> None:
    for counted, planned in lab(SHAPE.nodes, SHAPE.ranks_per_node).call(carried, op, route, 2**20, form):
        assert planned * (1 - BELOW) <= counted <= planned * (1 + ABOVE)
