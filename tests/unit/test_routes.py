"""Every route's plan, carried out with sets of contributors; its bytes, its order, its time on links of two kinds."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

import pytest

from tests.cases import each
from towpath.core.buffers import wire_elements
from towpath.core.placement import GroupCollective
from towpath.core.routes import (
    COLLECTIVES,
    ROUTES,
    Grid,
    Group,
    Op,
    Send,
    cells_of,
    effective_route,
    parts_of,
    piece_bounds,
    sends,
)
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.topology.cluster import Topology

SHAPES = [Topology(*shape) for shape in ((1, 1), (1, 4), (3, 1), (2, 2), (2, 3), (3, 3), (4, 2), (2, 4), (2, 6))]
TWO_LEVELS = [t for t in SHAPES if t.nodes > 1 and t.ranks_per_node > 1]
ORDERS = ("rank order", "local-major")

routes = pytest.mark.parametrize("route", ROUTES)

SHORT, LONG = 1 << 10, 1 << 24  # bytes of slices that travel whole, and of those that a route may cut up
LENGTHS = (SHORT, LONG)


def group_of(shape: Topology, order: str) -> Group:
    ranks = range(shape.world)
    local_major = tuple(shape.local_of(r) * shape.nodes + shape.node_of(r) for r in ranks)
    return Group(tuple(ranks), tuple(ranks) if order == "rank order" else local_major)


def nodes_of(shape: Topology) -> list[int]:
    return [shape.node_of(r) for r in range(shape.world)]


def plan_of(op: Op, route: str, shape: Topology, order: str = "rank order", slice_bytes: int = LONG) -> list[Send]:
    parts = parts_of(route, Grid.of(nodes_of(shape)), slice_bytes)
    return list(sends(op, route, group_of(shape, order), nodes_of(shape), parts))


Held = dict[tuple[int, int, int], set[int]]  # member, slot, part → whose contributions it holds


def execute(plan: list[Send], held: Held) -> None:
    """What is posted leaves as it is then, and must stay so until it is due, when it arrives."""
    events = sorted([(s.step, 1, i) for i, s in enumerate(plan)] + [(s.until, 0, i) for i, s in enumerate(plan)])
    sent: dict[int, set[int]] = {}
    for _, posted, i in events:
        s = plan[i]
        source, target = (s.source, s.slot, s.part), (s.target, s.slot, s.part)
        if posted:
            sent[i] = set(held[source])
            assert sent[i], "sent before it is held"
            continue
        assert held[source] == sent[i], "changed while it was being sent"
        if s.adds:
            assert not held[target] & sent[i], "a contribution would be counted twice"
            held[target] |= sent[i]
        else:
            held[target] = sent[i]


@routes
@each(shape=SHAPES, order=ORDERS, slice_bytes=LENGTHS)
def test_a_gather_brings_every_slice_to_everyone_exactly_once(
    slice_bytes: int, route: str, order: str, shape: Topology
) -> None:
    group, plan = group_of(shape, order), plan_of(Op.ALL_GATHER, route, shape, order, slice_bytes)
    parts = plan[0].parts if plan else 1
    held: Held = defaultdict(set)
    for member, slot in enumerate(group.slots):
        held.update({(member, slot, part): {member} for part in range(parts)})
    execute(plan, held)
    for member in range(shape.world):
        for owner, slot in enumerate(group.slots):
            assert all(held[member, slot, part] == {owner} for part in range(parts))
    assert len(plan) == shape.world * (shape.world - 1) * parts
    assert len({(s.target, s.piece) for s in plan}) == len(plan)


@routes
@pytest.mark.parametrize("op", [Op.REDUCE_SCATTER, Op.ALL_REDUCE])
@each(shape=SHAPES, order=ORDERS, slice_bytes=LENGTHS)
def test_a_reduction_counts_every_contribution_exactly_once(
    slice_bytes: int, op: Op, route: str, order: str, shape: Topology
) -> None:
    group, plan = group_of(shape, order), plan_of(op, route, shape, order, slice_bytes)
    parts, everyone = (plan[0].parts if plan else 1), set(range(shape.world))
    held: Held = {(m, s, p): {m} for m in everyone for s in everyone for p in range(parts)}
    execute(plan, held)
    for member in everyone:
        for slot in everyone if op is Op.ALL_REDUCE else [group.slots[member]]:
            assert all(held[member, slot, part] == everyone for part in range(parts))


@routes
@each(shape=SHAPES, op=COLLECTIVES, slice_bytes=LENGTHS)
def test_plans_are_in_the_order_of_their_steps_and_every_message_ends(
    slice_bytes: int, op: Op, route: str, shape: Topology
) -> None:
    plan = plan_of(op, route, shape, slice_bytes=slice_bytes)
    assert [s.step for s in plan] == sorted(s.step for s in plan)
    assert all(0 <= s.step < s.until and s.source != s.target for s in plan)
    # What one posts between two of its peer's steps, the peer posts too: steps that are empty for one are so for all.
    by_member = [{s.step for s in plan if m in (s.source, s.target)} for m in range(shape.world)]
    assert all(steps == by_member[0] for steps in by_member)


@routes
@each(shape=SHAPES, order=ORDERS, op=COLLECTIVES)
def test_pieces_cover_a_region_of_any_length(
    op: Op, route: str, order: str, shape: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the bytes of a transfer are those of its messages, counted one by one."""
    monkeypatch.setattr("towpath.core.routes.SMALLEST_PART_BYTES", 64)
    group, node = group_of(shape, order), shape.node_of
    for elements in (0, 1, 5, 720, 1009):
        plan = plan_of(op, route, shape, order, 4 * ceil(elements / shape.world))
        lengths = [end - start for s in plan for start, end in [piece_bounds(elements, shape.world, s.piece)]]
        assert sum(lengths) == (2 if op is Op.ALL_REDUCE else 1) * (shape.world - 1) * elements
        covered = sorted(i for p in {s.piece for s in plan} for i in range(*piece_bounds(elements, shape.world, p)))
        assert covered == (list(range(elements)) if shape.world > 1 else [])
        transfer = Transfer(
            TransferKind.GRAD_SYNC,
            Range("", "", elements, "float32"),
            GroupCollective(op, 1, (group,)),
            Transport(route),
            shape,
        )
        crossing = [(node(s.source), n) for s, n in zip(plan, lengths, strict=True) if node(s.source) != node(s.target)]
        for cable in range(shape.nodes):
            assert transfer.cable_bytes(cable) == 4 * sum(n for j, n in crossing if j == cable)
        assert transfer.inter_bytes == 4 * sum(n for _, n in crossing)
        assert transfer.intra_bytes == 4 * sum(lengths) - transfer.inter_bytes


@pytest.mark.parametrize("shape", TWO_LEVELS, ids=str)
@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.REDUCE_SCATTER])
def test_each_cable_carries_what_the_route_promises(op: Op, shape: Topology) -> None:
    """In slices, a node: p − R by the two-level routes, p − 1 by a ring, R(p − R) in one hop."""
    world, ranks = shape.world, shape.ranks_per_node
    elements = 144 * world
    promised = dict.fromkeys(("hierarchical", "ho-ring", "two-hop"), world - ranks)
    promised |= {"flat": world - 1, "ring": world - 1, "one-hop": ranks * (world - ranks)}
    for route, slices in promised.items():
        move = GroupCollective(op, 1, (group_of(shape, "rank order"),))
        transfer = Transfer(TransferKind.GATHER, Range("", "", elements, "float32"), move, Transport(route), shape)
        assert {transfer.cable_bytes(node) for node in range(shape.nodes)} == {slices * 144 * 4}


@pytest.mark.parametrize("shape", [t for t in SHAPES if t not in TWO_LEVELS], ids=str)
@routes
def test_where_there_is_one_kind_of_link_every_route_sends_what_flat_sends(route: str, shape: Topology) -> None:
    """But for one-hop, which a reduction with a codec takes there: by a ring every member would round."""
    if route == "one-hop":
        assert effective_route(route, Grid.of(nodes_of(shape))) == "one-hop"
        return
    assert effective_route(route, Grid.of(nodes_of(shape))) in ("flat", "ring")
    for op in COLLECTIVES:
        assert plan_of(op, route, shape) == plan_of(op, "flat", shape)


def test_members_that_do_not_form_a_grid_are_our_own_bug() -> None:
    for nodes in ([0, 1, 0, 1], [0, 1, 1, 0]):
        with pytest.raises(AssertionError, match="not node by node"):
            Grid.of(nodes)


# --- time ------------------------------------------------------------------------------------------------------------


def seconds(plan: list[Send], shape: Topology, inter: float, intra: float) -> float:
    """Of one member of a plan in which all do alike: a slice takes `inter` to cross, `intra` inside the node, and each
    kind of link carries one message after the other."""
    mine = [s for s in plan if s.source == 0]
    free, done = {True: 0.0, False: 0.0}, dict[int, float]()
    for i, s in enumerate(mine):
        posted = max((done[k] for k in range(i) if mine[k].until <= s.step), default=0.0)
        crosses = shape.node_of(s.target) != 0
        free[crosses] = max(free[crosses], posted) + (inter if crosses else intra) / s.parts
        done[i] = free[crosses]
    return max(done.values())


@each(shape=TWO_LEVELS, inter=[1, 2, 5, 20], op=[Op.ALL_GATHER, Op.REDUCE_SCATTER], slice_bytes=LENGTHS)
def test_the_ho_ring_takes_no_longer_than_its_model(slice_bytes: int, op: Op, inter: float, shape: Topology) -> None:
    """max(g(M−1)·tₐ, (g−1)·tₑ + (M−1)·tₐ), where the second is of a ring that is not cut in parts."""
    g, width, intra = shape.nodes, shape.ranks_per_node, 1.0
    model = max(g * (width - 1) * intra, (g - 1) * inter + (width - 1) * intra)
    assert seconds(plan_of(op, "ho-ring", shape, slice_bytes=slice_bytes), shape, inter, intra) <= model * (1 + 1e-9)


@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.REDUCE_SCATTER])
def test_two_nodes_of_four_behind_cables_of_a_sixteenth_take_what_the_algorithms_say(op: Op) -> None:
    """In cable times, of one slice over the cable that a node's ranks share: flat 7, ho-ring 4 + 3·4/16/4."""
    shape, inter, intra = Topology(2, 4), 4.0, 4 / 16
    taken = {route: seconds(plan_of(op, route, shape), shape, inter, intra) for route in ("hierarchical", "ho-ring")}
    assert taken["ho-ring"] == pytest.approx(4 + 3 * 4 / 16 / 4)
    assert taken["hierarchical"] == pytest.approx(4 + 2 * 3 * 4 / 16)


# --- memory ----------------------------------------------------------------------------------------------------------


@routes
@each(shape=SHAPES, order=ORDERS, slice_bytes=LENGTHS)
def test_no_cell_of_the_wire_buffer_is_used_twice_at_a_time(
    slice_bytes: int, route: str, order: str, shape: Topology
) -> None:
    plan = plan_of(Op.REDUCE_SCATTER, route, shape, order, slice_bytes)
    for member in range(shape.world):
        received = [s for s in plan if s.target == member]
        cells = cells_of(received)
        for i, (first, cell) in enumerate(zip(received, cells, strict=True)):
            for later, other in zip(received[i + 1 :], cells[i + 1 :], strict=True):
                assert cell != other or first.until <= later.step


def test_wire_buffers_stay_below_the_region_but_for_an_all_to_all() -> None:
    shape = Topology(2, 8)
    grid, elements = Grid.of(nodes_of(shape)), 16 * 64

    def share(route: str) -> float:
        return wire_elements(Op.REDUCE_SCATTER, route, grid, parts_of(route, grid, LONG), elements)[0] / elements

    sizes = {route: share(route) for route in ROUTES}
    assert sizes["flat"] == sizes["ring"] == 1 / 16
    assert sizes["hierarchical"] == 2 / 16
    assert sizes["ho-ring"] <= 1 / 4
    assert sizes["one-hop"] <= 2
    assert sizes["two-hop"] <= 9 / 8
    assert wire_elements(Op.ALL_GATHER, "ho-ring", grid, 8, elements) == (0, 0)
