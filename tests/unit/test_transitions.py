"""Every legal placement, carried out with sets of contributors instead of numbers."""

import itertools

import pytest

from towpath.spec.placement import Placement, legal_extents
from towpath.spec.routes import ROUTES, Op, sends
from towpath.spec.transitions import Cut, Move, transitions
from towpath.topology.cluster import Topology

TOPOLOGIES = [Topology(2, 2), Topology(2, 3), Topology(4, 2), Topology(3, 1), Topology(2, 4), Topology(1, 4)]


def placements(topology: Topology) -> list[Placement]:
    legal = legal_extents(topology)
    chains = itertools.product(legal, repeat=3)
    return [Placement(p, g, o) for p, g, o in chains if p.divides(g) and g.divides(o)]


CASES = [(t, p) for t in TOPOLOGIES for p in placements(t)]

Contents = dict[tuple[int, int], frozenset[int]]  # (rank, finest slice) → whose contributions it holds


def run(move: Move, route: str, finest: int, offsets: list[int], contents: Contents) -> None:
    """Execute one move on every group, message by message, as the route's plan says."""
    for group in move.groups:
        members = len(group.ranks)
        size = finest // move.regions // members
        plan = list(sends(move.op, route, group))
        adding = {Op.ALL_GATHER: 0, Op.REDUCE_SCATTER: members - 1, Op.ALL_REDUCE: members - 1}[move.op]
        for step in sorted({s.step for s in plan}):
            now = [s for s in plan if s.step == step]
            sent = [
                [
                    contents[group.ranks[s.source], offsets[group.ranks[s.source]] + s.slot * size + k]
                    for k in range(size)
                ]
                for s in now
            ]
            for message, values in zip(now, sent, strict=True):
                target = group.ranks[message.target]
                for k, value in enumerate(values):
                    key = (target, offsets[target] + message.slot * size + k)
                    if step < adding:
                        assert not contents[key] & value, "a contribution would be counted twice"
                        contents[key] = contents[key] | value
                    else:
                        contents[key] = value


def offsets(cut: Cut, finest: int) -> list[int]:
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
        run(move, route, finest, [0] * world, gradients)
    for move in moves.sync:
        within = moves.grads if move.op is Op.REDUCE_SCATTER else moves.optimizer
        run(move, route, finest, offsets(within, finest), gradients)
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
    for move in moves.publish:
        run(move, route, finest, offsets(moves.params, finest), weights)
    for move in moves.gather:
        run(move, route, finest, [0] * world, weights)
    assert all(weights[rank, k] == {k} for rank in range(world) for k in range(finest))


@pytest.mark.parametrize(("topology", "placement"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_each_cut_lies_inside_the_one_before(topology: Topology, placement: Placement) -> None:
    moves = transitions(placement, topology)
    for coarse, fine in ((moves.params, moves.grads), (moves.grads, moves.optimizer)):
        ratio = fine.count // coarse.count
        assert all(f // ratio == c for c, f in zip(coarse.slots, fine.slots, strict=True))


def test_transitions_below_a_spanning_extent_stay_in_their_column() -> None:
    """MiCS and PaRO rest on it: what follows a node-local reduction crosses only between like local ranks."""
    topology = Topology(4, 2)
    from towpath.spec.presets import strategy

    for name in ("paro-igg", "paro-iig", "paro-nig"):
        sync_and_publish = [*strategy(name, topology).moves.sync]
        if name != "paro-nig":
            sync_and_publish += strategy(name, topology).moves.publish
        for move in sync_and_publish:
            for group in move.groups:
                assert len({topology.local_of(r) for r in group.ranks}) == 1
