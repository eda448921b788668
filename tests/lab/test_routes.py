"""What the kernel counted on each node's cable is what the plan of each route said."""

from __future__ import annotations

from collections.abc import Callable

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
Case = tuple[Op, str, Form]
CASES: list[Case] = [(op, route, Form.MESSAGES) for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) for route in ROUTES]
# A reduce-scatter of gloo is an all-reduce inside, unlike that of NCCL.
CASES += [(Op.ALL_GATHER, route, Form.COLLECTIVES) for route in ("flat", "hierarchical", "ho-ring")]
CASES += [(Op.REDUCE_SCATTER, route, Form.COLLECTIVES) for route in ("one-hop", "two-hop")]


def carried(rank: int, world: int, elements: int) -> dict[Case, tuple[int, int]]:
    """Bytes this node sent over its cable in a collective of each case: by the kernel, and by the plan."""
    routes.SMALLEST_PART_BYTES_IN_CALLS = 1 << 16  # slices have 512 KiB
    groups, region = Groups(), torch.ones(elements)
    return {case: _carried(rank, groups, region, *case) for case in CASES}


def _carried(rank: int, groups: Groups, region: torch.Tensor, op: Op, route: str, form: Form) -> tuple[int, int]:
    everyone = tuple(range(SHAPE.world))
    transfer = Transfer(
        TransferKind.GRAD_SYNC,
        Range("", "", region.numel(), "float32"),
        GroupCollective(op, 1, (Group(everyone, everyone),)),
        Transport(route),
        SHAPE,
        form=form,
    )
    members = group_rank(transfer, rank, groups.of)
    collective = select(transfer, members, torch.device("cpu"))
    shard = region.chunk(SHAPE.world)[rank]
    collective.run(region, shard, workspace())  # members compare what they mean, once
    before = counters_at_rest()
    collective.run(region, shard, workspace())
    return counters_at_rest() - before, transfer.cable_bytes(SHAPE.node_of(rank))


# Starting ranks takes longer than a collective: one start serves all cases.
def test_each_cable_carries_the_plans_bytes(lab: Callable[..., Lab]) -> None:
    found = lab(SHAPE.nodes, SHAPE.ranks_per_node).call(carried, 2**20, timeout_seconds=300)
    wrong = {
        (rank, *case): (counted, planned)
        for rank, answer in enumerate(found)
        for case, (counted, planned) in answer.items()
        if not planned * (1 - BELOW) <= counted <= planned * (1 + ABOVE)
    }
    assert not wrong, "(rank, case): (counted, planned)"
    assert all(answer.keys() == set(CASES) for answer in found)
