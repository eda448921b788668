"""Racks: what leaves them, by the messages; the numbers of their ranks; and what the simulator and the planner see."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from tests.unit.test_route_bytes import bytes_of_message, drawn, messages_of
from tests.unit.test_sim import UNITS, hardware
from towpath.core.formats import Codec
from towpath.core.owner_stepped import OwnedParameter
from towpath.core.placement import GroupCollective, send
from towpath.core.presets import strategy
from towpath.core.routes import ROUTES, Form, Group, Op
from towpath.core.schedule import schedule
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Activation, Matrices, Range, owner_messages, piece_bytes
from towpath.errors import ConfigError
from towpath.plan.catalog import load_cluster
from towpath.plan.hardware import CABLE, SPINE, Racks, StageLocation
from towpath.plan.transfer_costs import TransferShape, message_cost, phase_costs
from towpath.topology.cluster import Extent, Topology
from towpath.topology.launcher import numbers_by_rack

SHAPES = [Topology(*shape) for shape in ((4, 2, 2), (6, 1, 2), (6, 2, 3), (8, 3, 2), (3, 2, 1), (9, 1, 3))]


def test_racks_divide_the_nodes_or_are_refused_with_the_remedy() -> None:
    topology = Topology(6, 2, 2)
    assert topology.racks == 3 and [*map(topology.rack_of, range(6))] == [0, 0, 1, 1, 2, 2]
    assert Topology(4, 2, 4) == Topology(4, 2) and Topology(4, 2).racks == 1
    with pytest.raises(ConfigError, match=r"racks of 4 nodes do not divide 6 nodes.*4 or 8 nodes"):
        Topology(6, 2, 4)
    with pytest.raises(ConfigError, match="nodes_per_rack must be a whole number"):
        Topology(6, 2, 0)


def test_some_of_the_ranks_have_racks_too() -> None:
    topology = Topology(8, 2, 4)
    assert topology.of(range(8)) == Topology(4, 2)
    assert topology.of(range(4, 12)) == Topology(4, 2, 2)
    assert topology.of(range(6, 12)) == Topology(3, 2, 1)  # one node of a rack and two of the next
    assert topology.of(range(0, 16, 2)) == Topology(8, 1, 4)


@pytest.mark.parametrize("route", ROUTES)
def test_what_leaves_a_rack_is_the_sum_of_the_messages(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towpath.core.routes.SMALLEST_PART_BYTES", 256)
    for form in Form:
        for shape in SHAPES:
            transfer = replace(drawn(route, shape, form), topology=shape)
            racks = [shape.rack_of(shape.node_of(rank)) for rank in transfer.move.groups[0].ranks]
            leaving = Counter[int]()
            for each in messages_of(transfer):
                if racks[each.source] != racks[each.target]:
                    leaving[racks[each.source]] += bytes_of_message(transfer, *each[4:])
            assert [*map(transfer.rack_bytes, range(shape.racks))] == [leaving[r] for r in range(shape.racks)], transfer
            assert transfer.between_racks_bytes == leaving.total()


def test_an_encoded_all_reduce_goes_directly_and_comes_back_in_a_ring() -> None:
    """On one rank per node, two hops are one, and the gather of encoded bytes is the backend's."""
    topology, codec = Topology(4, 1, 2), Codec.parse("int8:32")
    move = GroupCollective(Op.ALL_REDUCE, 1, (Group((0, 1, 2, 3), (0, 1, 2, 3)),))
    payload, transport = Range("", "", 4096, "float32"), Transport("two-hop", codec)
    transfer = Transfer(TransferKind.GRAD_SYNC, payload, move, transport, topology)
    cell = transfer.cable_bytes(0) // 6  # three to the other nodes, and three of the ring
    assert [transfer.rack_bytes(rack) for rack in (0, 1)] == [(2 * 2 + 3) * cell] * 2


def test_messages_of_pipelines_and_to_owners_of_matrices_leave_racks() -> None:
    topology = Topology(4, 1, 2)
    payload = Activation(0, (4, 8), "float32")
    inside, across = (
        Transfer(TransferKind.ACTIVATION, payload, send([pair]), Transport(), topology) for pair in ((2, 3), (1, 2))
    )
    assert [inside.rack_bytes(0), inside.rack_bytes(1)] == [0, 0] != [across.rack_bytes(0), across.rack_bytes(1)]
    assert across.between_racks_bytes == across.inter_bytes
    for wrong in (-1, 2):
        with pytest.raises(ConfigError, match=f"rack {wrong}: the cluster has 2. Expected a number from 0 to 1"):
            across.rack_bytes(wrong)
    with pytest.raises(ConfigError, match="node 4: the cluster has 4"):
        across.cable_bytes(4)

    whole = [OwnedParameter("weight", (50, 100), 0, 0, 0)]
    made = schedule(strategy("zero1", topology), UNITS, 1, whole=whole)
    (first, *_) = [t for t in made.transfers if isinstance(t.payload, Matrices)]
    assert isinstance(first.payload, Matrices)
    leaving = Counter[int]()
    for group in first.move.groups:
        for each in owner_messages(first.move.op, first.payload.matrices, group):
            source, target = (topology.rack_of(topology.node_of(group.ranks[i])) for i in (each.source, each.target))
            if source != target:
                leaving[source] += piece_bytes(first.payload.matrices[each.matrix].pieces[each.slot], 4, None)
    assert leaving.total() > 0 and [first.rack_bytes(0), first.rack_bytes(1)] == [leaving[0], leaving[1]]


@pytest.mark.parametrize("name", ["ddp", "zero3", "mics", "mics over nodes", "paro-iig", "zero++", "hpz"])
def test_the_simulator_takes_out_of_racks_what_the_schedule_sends(name: str) -> None:
    for topology in (Topology(8, 2, 4), Topology(6, 2, 3), Topology(4, 2, 1)):
        group: dict[str, Any] = {"group": Extent(2, 2)} if name == "mics over nodes" else {}
        made = strategy(name.partition(" ")[0], topology, **group)
        on = replace(hardware(topology), racks=Racks(topology.nodes_per_rack or 1, 1e9))
        for transfer in chain.from_iterable(schedule(made, UNITS, 1, form=form).transfers for form in Form):
            spine = sum(cost.needs.get(SPINE, 0.0) for cost in phase_costs(TransferShape.of(transfer), on))
            most = max(map(transfer.rack_bytes, range(topology.racks)))
            # Slices are rounded up to equal lengths. All of an all-reduce that reduces directly counts as direct.
            assert 0.98 * most - 64 <= spine <= 1.5 * most + 64, (name, topology, str(transfer))


def test_a_message_between_stages_takes_what_both_racks_share() -> None:
    topology = Topology(4, 1, 2)
    on = replace(hardware(topology), racks=Racks(2, 1e9))
    stages = [StageLocation.of(f"stage {rank}", (rank,), on) for rank in range(4)]
    transfer = Transfer(
        TransferKind.ACTIVATION, Activation(0, (4, 8), "float32"), send([(0, 1)]), Transport(), topology
    )
    inside, across = (message_cost(transfer, on, stages[a], stages[a + 1]).needs for a in (0, 1))
    assert not any(SPINE in name for name in inside) and any(CABLE in name for name in inside)
    assert {name for name in across if SPINE in name} == {"spine out of rack 0", "spine into rack 1"}


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_ranks_are_numbered_rack_by_rack_and_rank_0_stays() -> None:
    racks = [(name, True) for name in "bbaabbaa"]
    assert numbers_by_rack(racks) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert numbers_by_rack([("", False)] * 3) == [0, 1, 2]
    assert numbers_by_rack([("s0.s1", False), ("s0.s2", False), ("s0.s1", False)]) == [0, 2, 1]  # as Slurm says it


def test_named_racks_that_are_uneven_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"uneven racks: 'a' has 2, 'b' has 1 ranks\. Start equally many nodes"):
        numbers_by_rack([("a", True), ("b", True), ("a", True)])
    with pytest.raises(ConfigError, match=r"rank 0 is in rack 'a', and rank 1 is in none.*TOWPATH_RACK on every node"):
        numbers_by_rack([("a", True), ("", False)])


# --- the planner ------------------------------------------------------------------------------------------------------


def test_a_described_cluster_has_racks_that_divide_its_nodes() -> None:
    cluster = load_cluster("ethernet-25g-racks")
    racks = cluster.hardware.racks
    assert racks is not None and cluster.topology.nodes_per_rack == racks.nodes < cluster.topology.nodes
    assert cluster.on(racks.nodes).topology.nodes_per_rack is None  # one rack holds them all
    assert cluster.on(4 * racks.nodes).topology.racks == 4
    with pytest.raises(ConfigError, match="Use equally many nodes of each rack"):
        cluster.on(racks.nodes + 1)
