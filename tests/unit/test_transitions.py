"""Every legal placement, carried out with sets of contributors instead of numbers."""

import itertools

import pytest

from towpath.core.placement import GroupCollective, Partition, Placement, legal_extents, transitions
from towpath.core.routes import ROUTES, Op, sends
from towpath.topology.cluster import Topology

TOPOLOGIES = [Topology(2, 2), Topology(2, 3), Topology(4, 2), Topology(3, 1), Topology(2, 4), Topology(1, 4)]


def placements(topology: Topology) -> list[Placement]:
    legal = legal_extents(topology)
    chains = itertools.product(legal, repeat=3)
    return [Placement(p, g, o) for p, g, o in chains if p.divides(g) and g.divides(o)]


CASES = [(t, p) for t in TOPOLOGIES for p in placements(t)]

Contents = dict[tuple[int, int], frozenset[int]]  # (rank, finest slice) → whose contributions it holds


def run(
    move: GroupCollective, route: str, topology: Topology, finest: int, offsets: list[int], contents: Contents
) -> None:
    """Execute one move on every group, message by message, as the route's plan says. All parts of a slice go alike."""
    for group in move.groups:
        size = finest // move.regions // len(group.ranks)
        nodes = list(map(topology.node_of, group.ranks))
        plan = [s for s in sends(move.op, route, group, nodes, parts=4) if s.part == 0]
        # What is posted in a step leaves as it is then; it arrives before the step in which it is due.
        order = sorted([(s.step, 1, i) for i, s in enumerate(plan)] + [(s.until, 0, i) for i, s in enumerate(plan)])
        sent: dict[int, list[frozenset[int]]] = {}
        for _, posted, i in order:
            s = plan[i]
            source, target = (
                [(rank, offsets[rank] + s.slot * size + k) for k in range(size)]
                for rank in (group.ranks[s.source], group.ranks[s.target])
            )
            if posted:
                sent[i] = [contents[key] for key in source]
                continue
            for key, value in zip(target, sent[i], strict=True):
                assert not s.adds or not contents[key] & value, "a contribution would be counted twice"
                contents[key] = contents[key] | value if s.adds else value


def offsets(cut: Partition, finest: int) -> list[int]:
    return [slot * (finest // cut.count) for slot in cut.slots]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("topology", "placement"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_gradients_reach_every_owner_once_and_weights_come_back_whole(
    topology: Topology, placement: Placement, route: str
) -> None:
    moves = transitions(placement, topology)
    world = topology.world
    finest = moves.optimizer.count * (world // moves.optimizer.count)  # so that an all-reduce divides too
    everything = frozenset(range(world))
    gradients: Contents = {(rank, k): frozenset([rank]) for rank in range(world) for k in range(finest)}
    for move in moves.reduce:
        run(move, route, topology, finest, [0] * world, gradients)
    for move in moves.grad_sync:
        within = moves.grads if move.op is Op.REDUCE_SCATTER else moves.optimizer
        run(move, route, topology, finest, offsets(within, finest), gradients)
    size = finest // moves.optimizer.count
    for rank in range(world):
        start = moves.optimizer.slots[rank] * size
        assert all(gradients[rank, start + k] == everything for k in range(size))

    # A weight is named by its position; each rank begins with its own OS slice alone.
    weights: Contents = {
        (rank, k): frozenset([k] if k // size == moves.optimizer.slots[rank] else [])
        for rank in range(world)
        for k in range(finest)
    }
    for move in moves.param_sync:
        run(move, route, topology, finest, offsets(moves.params, finest), weights)
    for move in moves.gather:
        run(move, route, topology, finest, [0] * world, weights)
    assert all(weights[rank, k] == {k} for rank in range(world) for k in range(finest))


@pytest.mark.parametrize(("topology", "placement"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_each_cut_lies_inside_the_one_before(topology: Topology, placement: Placement) -> None:
    moves = transitions(placement, topology)
    for coarse, fine in ((moves.params, moves.grads), (moves.grads, moves.optimizer)):
        ratio = fine.count // coarse.count
        assert all(f // ratio == c for c, f in zip(coarse.slots, fine.slots, strict=True))
