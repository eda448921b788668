"""What a route keeps busy, and for how many rounds: against its messages, on every grid of up to 64 ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from tests.profiles import made_profile
from towpath.core.costs import phases
from towpath.core.placement import GroupCollective, Placement, everyone, legal_extents, transitions
from towpath.core.routes import COLLECTIVES, ROUTES, Form, Grid, Group, Op, effective_route, sends
from towpath.core.strategy import TransferKind
from towpath.core.transport import Transport
from towpath.plan.hardware import Link
from towpath.plan.transfer_costs import MoveShape, TransferShape, move_shapes, phase_costs, seconds_alone
from towpath.topology.cluster import Topology

MOST = 36
GRIDS = [Grid(n, m) for n in range(1, MOST + 1) for m in range(1, MOST // n + 1) if n * m > 1]
CUT = {"ho-ring": 4, "two-hop": 3}  # into so many parts


@pytest.mark.parametrize("route", ROUTES)
def test_rounds_and_loads_are_those_of_the_messages(route: str) -> None:
    for grid in GRIDS if route == "hierarchical" else GRIDS[::3]:
        parts = 1 if grid.plain else CUT.get(route, 1)
        members = grid.nodes * grid.width
        group = Group(tuple(range(members)), tuple(range(members)))
        nodes = [i // grid.width for i in range(members)]
        for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
            leaving, inside, rounds = Counter[int](), Counter[int](), 0
            sent_out, sent_inside = Counter[int](), Counter[int]()
            for send in sends(op, route, group, nodes, parts):
                one = 1 / send.parts
                if nodes[send.source] == nodes[send.target]:
                    inside[send.source] += one
                    sent_inside[send.source] += 1
                else:
                    leaving[nodes[send.source]] += one
                    sent_out[send.source] += 1
                rounds = max(rounds, send.until)

            found = phases(op, route, grid, parts)

            assert sum(p.rounds for p in found) == rounds, (op, grid)
            assert sum(p.leaving for p in found) == pytest.approx(max(leaving.values(), default=0)), (op, grid)
            assert sum(p.inside for p in found) == pytest.approx(max(inside.values(), default=0)), (op, grid)
            assert sum(p.messages_out for p in found) == pytest.approx(sent_out.total() / members), (op, grid)
            assert sum(p.messages_inside for p in found) == pytest.approx(sent_inside.total() / members), (op, grid)
        assert phases(Op.ALL_REDUCE, route, grid, parts) == phases(op, route, grid, parts) + phases(
            Op.ALL_GATHER, route, grid, parts
        )


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "ho-ring"])
def test_collectives_take_the_time_of_rings_and_few_calls(route: str) -> None:
    """Their bytes and rounds are those of the messages of the route that they stand for."""
    calls_of = {"flat": 1, "hierarchical": 2, "one-hop": 1, "two-hop": 2 * CUT["two-hop"]}
    for grid, op in product(GRIDS, COLLECTIVES):
        parts = 1 if grid.plain else CUT.get(route, 1)
        found = phases(op, route, grid, parts, Form.COLLECTIVES)
        used = [effective_route(route, grid, o, Form.COLLECTIVES) for o in (Op.REDUCE_SCATTER, Op.ALL_GATHER)]
        halves = {Op.REDUCE_SCATTER: used[:1], Op.ALL_GATHER: used[1:], Op.ALL_REDUCE: used}[op]
        expected = [
            phase
            for half, name in zip((Op.REDUCE_SCATTER, Op.ALL_GATHER)[op is Op.ALL_GATHER :], halves, strict=False)
            for phase in phases(half, name, grid, parts if name == "two-hop" else 1)
        ]
        assert [(p.rounds, p.leaving, p.inside) for p in found] == [
            (p.rounds, p.leaving, p.inside) for p in expected
        ], (op, grid)
        calls = sum(p.messages_out + p.messages_inside for p in found)
        assert calls == sum(calls_of[name] for name in (halves[:1] if halves == ["flat", "flat"] else halves))
        assert calls <= 8


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_collectives_of_an_ho_ring_are_those_of_hierarchical_in_overlapping_parts(parts: int) -> None:
    """Where both links take as long, the last part inside is all that does not overlap."""
    for grid, op in product(GRIDS, COLLECTIVES):
        whole = phases(op, "hierarchical", grid, 1, Form.COLLECTIVES)
        found = phases(op, "ho-ring", grid, parts, Form.COLLECTIVES)
        leaving, inside = sum(p.leaving for p in whole), sum(p.inside for p in whole)
        assert sum(p.leaving for p in found) == pytest.approx(leaving), (op, grid)
        assert sum(p.inside for p in found) == pytest.approx(inside), (op, grid)
        if grid.plain or parts == 1:
            assert found == whole, (op, grid)
            continue
        assert sum(p.messages_out for p in found) == parts * sum(p.messages_out for p in whole), (op, grid)
        assert sum(p.messages_inside for p in found) == parts * sum(p.messages_inside for p in whole), (op, grid)
        assert sum(p.rounds for p in found) == parts * sum(p.rounds for p in whole if p.leaving) + sum(
            p.rounds for p in whole if p.inside
        ), (op, grid)
        taken = sum(max(p.leaving / leaving, p.inside / inside) for p in found)
        assert taken == pytest.approx(1 + 1 / parts), (op, grid)  # hierarchical: 2


@pytest.mark.parametrize("topology", [Topology(2, 4), Topology(2, 8), Topology(4, 8)], ids=str)
def test_an_ho_ring_of_collectives_takes_at_most_four_fifths_of_hierarchical(topology: Topology) -> None:
    """Where both links take as long. So do transfers of the simulator, with a copy of the last part on the device."""
    nodes, width = topology.nodes, topology.ranks_per_node
    device = replace(made_profile().cluster(measured_collectives=False).hardware, cores=None, topology=topology)
    cable = 12.5e9  # bytes a second of a node
    inside = cable * nodes * (width - 1) / (width * (nodes - 1))  # of a rank
    device = replace(device, intra=Link(inside, 5e-6), inter=Link(cable, 1e-5), memory_rate=1e12, sum_rate=1e12)
    for op, mebibytes in product(COLLECTIVES, (4, 8, 32)):
        move = MoveShape(op, 1, Grid(nodes, width), 1)
        elements = mebibytes * (1 << 18) * topology.world
        parted, whole = (
            TransferShape.of_move(move, Transport(route), elements, "float32", Form.COLLECTIVES)
            for route in ("ho-ring", "hierarchical")
        )
        assert parted.parts == (2 if op is Op.ALL_REDUCE or mebibytes == 4 else 4)
        taken = [seconds_alone(phase_costs(each, device), device) for each in (parted, whole)]
        assert (1 + 1 / parted.parts) / 2 < taken[0] / taken[1] <= 0.8, (op, mebibytes, taken)


SHAPES = [Topology(*shape) for shape in ((1, 1), (1, 8), (8, 1), (2, 2), (4, 2), (2, 6), (8, 4))]


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_shapes_of_moves_are_those_of_the_groups(topology: Topology) -> None:
    legal = legal_extents(topology)
    for p, g, o, copy in product(legal, legal, legal, [None, *legal]):
        if p.divides(g) and g.divides(o) and (copy is None or copy.divides(p)):
            placement = Placement(p, g, o, copy)
            made = transitions(placement, topology)
            for kind, found in move_shapes(placement, topology).items():
                moves = everyone(topology) if kind is TransferKind.UNUSED_PARAMS else getattr(made, kind.value)
                assert [(s.op, s.regions, s.grid, s.stride) for s in found] == [shape_of(m, topology) for m in moves], (
                    f"{kind} of {placement}"
                )


def shape_of(move: GroupCollective, topology: Topology) -> tuple[Op, int, Grid, int]:
    ranks = move.groups[0].ranks
    grid = Grid.of([topology.node_of(rank) for rank in ranks])
    nodes = sorted({topology.node_of(rank) for rank in ranks})
    stride = nodes[1] - nodes[0] if len(nodes) > 1 else 1
    return move.op, move.regions, grid, stride
