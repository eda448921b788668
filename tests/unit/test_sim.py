"""The simulator: what shares a resource, what a transfer needs, and a whole step by the clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from towpath.core.formats import Precision
from towpath.core.placement import legal_placements
from towpath.core.presets import strategies, strategy
from towpath.core.routes import ROUTES, Grid, Op
from towpath.core.schedule import schedule, steady_tasks
from towpath.core.strategy import GRADIENTS, Strategy, TransferKind
from towpath.core.transport import Transport
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.plan.bandwidth import BandwidthModel, Demand, Timeline
from towpath.plan.hardware import CABLE, INSIDE, CodecSpeed, Hardware, Link, Racks
from towpath.plan.replay import ComputeSeconds, Replay, SimulatedStage
from towpath.plan.transfer_costs import MoveShape, TransferShape, move_shapes, phase_costs
from towpath.topology.cluster import Topology

SHAPES = [Topology(2, 2), Topology(4, 2), Topology(3, 1), Topology(1, 4), Topology(4, 8)]
SPEED = CodecSpeed(1e9, 1e9)
CODECS = tuple((name, SPEED) for name in ("int8", "int4", "bf16"))
DEPTH = 4
UNITS = (
    UnitSpec("", (BucketSpec((5000, 64)),), root=True),
    *(UnitSpec(f"blocks.{i}", (BucketSpec((64 * 64, 64, 64 * 64)),)) for i in range(DEPTH)),
)


def hardware(topology: Topology, cable: float = 1e9, inside: float = 1e10, latency: float = 0.0) -> Hardware:
    return Hardware(
        topology, Link(inside, latency), Link(cable, latency), memory_rate=1e15, sum_rate=1e15, codecs=CODECS
    )


def replayed(made: Strategy, on: Hardware, compute: float = 1e-3, micro_steps: int = 1, share: float = 1.0) -> Timeline:
    plans = [plan_unit(made, unit, Precision()) for unit in UNITS]
    seconds = ComputeSeconds([0.0] + [compute] * DEPTH, [0.0] + [2 * compute] * DEPTH, 0.0, 0.0, share=share)
    return Replay([SimulatedStage(made, plans, seconds)], on, micro_steps=micro_steps).run().ranks[0]


# --- sharing ---------------------------------------------------------------------------------------------------------


def ends_of(fluid: BandwidthModel, flows: dict[str, Demand]) -> dict[str, float]:
    for flow in flows.values():
        fluid.start(flow)
    ends: dict[str, float] = {}
    while fluid.demands:
        for ended in fluid.advance():
            ends |= {name: fluid.now for name, flow in flows.items() if flow is ended}
    return ends


def test_two_share_a_resource_evenly_and_the_last_has_it_alone() -> None:
    fluid = BandwidthModel({"cable": 10.0})

    found = ends_of(fluid, {"short": Demand(1.0, {"cable": 10.0}), "long": Demand(3.0, {"cable": 30.0})})

    assert found == pytest.approx({"short": 2.0, "long": 4.0})


def test_what_one_cannot_use_the_others_get() -> None:
    fluid = BandwidthModel({"cable": 10.0})

    found = ends_of(fluid, {"slow": Demand(10.0, {"cable": 20.0}), "quick": Demand(1.0, {"cable": 10.0})})

    assert found == pytest.approx({"slow": 10.0, "quick": 1.25})  # 8 of 10 a second, beside 2


def test_what_needs_different_things_goes_on_at_once() -> None:
    found = ends_of(BandwidthModel({"a": 1.0, "b": 1.0}), {"x": Demand(2.0, {"a": 2.0}), "y": Demand(3.0, {"b": 3.0})})

    assert found == pytest.approx({"x": 2.0, "y": 3.0})


def test_what_waits_for_one_thing_takes_little_of_another() -> None:
    """Two transfers share the cable, and need a little of the processor: who computes gets all the rest of that."""
    cable, little = {"cable": 10.0}, {"processor": 0.1}
    fluid = BandwidthModel({"cable": 10.0, "processor": 1.0})

    found = ends_of(
        fluid,
        {
            "one": Demand(1.0, cable | little),
            "other": Demand(1.0, cable | little),
            "computing": Demand(2.0, {"processor": 2.0}),
        },
    )

    assert found == pytest.approx({"one": 2.0, "other": 2.0, "computing": 2.2})


def test_no_resource_is_ever_given_out_twice() -> None:
    draw = random.Random(0)
    for _ in range(300):
        capacities = {"a": draw.uniform(1, 10), "b": draw.uniform(1, 10)}
        fluid = BandwidthModel(capacities)
        for _ in range(draw.randrange(1, 7)):
            needs = {name: draw.uniform(0, 5) for name in ("a", "b") if draw.random() < 0.7}
            fluid.start(Demand(fluid.alone(needs) + draw.uniform(0.01, 1), needs))
        while fluid.demands:
            fluid.set_rates()
            for name, capacity in capacities.items():
                assert sum(f.rate * f.needs.get(name, 0) for f in fluid.demands) <= capacity * (1 + 1e-9)
            assert all(0 < f.rate <= 1 / f.seconds * (1 + 1e-9) for f in fluid.demands)
            fluid.advance()


# --- transfers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_transfers_need_of_the_cables_what_the_schedule_counts(topology: Topology) -> None:
    """Within what padding makes of slices that are not all of one length."""
    on = hardware(topology)
    labels = [(name, {}) for name in strategies()] + [("zero3", {"route": route}) for route in ROUTES]
    for name, options in labels:
        made = schedule(strategy(name, topology, **options), UNITS, micro_steps=2)
        for transfer in made.transfers:
            if transfer.kind is TransferKind.UNUSED_PARAMS:
                continue
            loads = phase_costs(TransferShape.of(transfer), on)
            cable = sum(load.needs.get(CABLE, 0) for load in loads) * topology.nodes
            inside = sum(load.needs.get(INSIDE, 0) for load in loads)
            assert cable == pytest.approx(transfer.inter_bytes, rel=0.02, abs=64), (name, options, str(transfer))
            assert inside * topology.world >= transfer.intra_bytes * 0.98, (name, options, str(transfer))


def test_a_ring_leaves_a_rack_once_and_all_to_all_from_every_node() -> None:
    """Eight nodes in racks of four; a rack's way out carries what one cable does, or most of what its nodes send."""
    topology = Topology(8, 2, 4)
    on = replace(hardware(topology), racks=Racks(4, 1e9))
    for route, cables in (("flat", 1.0), ("one-hop", 4 * 4 / 7)):
        made = schedule(strategy("zero3", topology, route=route), UNITS, 1)
        (first, *_) = [t for t in made.transfers if t.kind is TransferKind.GATHER]
        (load,) = phase_costs(TransferShape.of(first), on)
        assert load.needs["spine"] == pytest.approx(cables * load.needs[CABLE])


def test_on_nccl_a_small_all_reduce_takes_a_tree_and_a_large_a_ring() -> None:
    """64 nodes of 8: the ring waits for 1,022 messages, and the tree for 2 × (7 inside + 6 between nodes)."""
    on = hardware(Topology(64, 8), latency=1e-5)
    move = MoveShape(Op.ALL_REDUCE, 1, Grid(64, 8), 1)
    small, large = (
        phase_costs(TransferShape.of_move(move, Transport("flat"), numel, "float32", on.form), on)
        for numel in (512, 512 << 20)
    )
    assert sum(cost.seconds for cost in small) == pytest.approx(2 * 7 * on.intra.latency + 2 * 6 * on.inter.latency)
    assert sum(cost.seconds for cost in large) == pytest.approx(2 * 511 * on.inter.latency)


@pytest.mark.parametrize("name", ["zero1", "paro-iig", "ddp"])
def test_exact_transfers_load_the_cable_with_the_share_that_is_expected(name: str) -> None:
    """And a transfer costs what the planner's shape of it costs, which knows no ranks."""
    topology = Topology(4, 2)
    on = replace(hardware(topology), cores=2.0)
    units = [UnitSpec("", (BucketSpec((1 << 20,)),))]
    plain = strategy(name, topology)
    sums = {kind.value: replace(plain.transport(kind), route="ring") for kind in GRADIENTS}
    plain = replace(plain, **sums)
    made = [schedule(each, units, 1).transfers for each in (plain, plain.with_exact_transports())]
    seen = 0
    for before, after in zip(*made, strict=True):
        if not after.coding:
            continue
        loads = [sum(c.needs.get(CABLE, 0.0) for c in phase_costs(TransferShape.of(t), on)) for t in (before, after)]
        assert loads[1] == pytest.approx(after.coding.share * loads[0])
        (shape,) = move_shapes(plain.placement, topology)[after.kind]
        numel = after.elements * after.move.regions
        assert TransferShape.of_move(shape, after.transport, numel, after.dtype) == TransferShape.of(after)
        seen += 1
    assert seen == {"zero1": 2, "paro-iig": 2, "ddp": 1}[name]


# --- a step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", strategies())
def test_each_queue_carries_out_what_the_schedule_has_in_its_order(name: str) -> None:
    made = strategy(name, Topology(2, 2))
    found = replayed(made, hardware(Topology(2, 2), latency=1e-5), micro_steps=2)

    plans = [plan_unit(made, unit, Precision()) for unit in UNITS]
    expected = [(m, t.kind, plans[t.unit].spec.name) for m, t in steady_tasks(plans, 2)]
    for queue in {e.track for e in found.events} - {"compute", "waiting"}:
        events = [e for e in sorted(found.events, key=lambda e: e.end) if e.track == queue]
        kinds = {e.kind for e in events} - {TransferKind.UNUSED_PARAMS}
        assert [(e.micro_step, e.kind, e.unit) for e in events if e.kind in kinds] == [
            e for e in expected if e[1] in kinds
        ]


def test_links_without_limits_leave_what_is_computed() -> None:
    fast = hardware(Topology(2, 2), cable=1e18, inside=1e18)

    found = replayed(strategy("zero3", Topology(2, 2)), fast, compute=1e-3)

    assert found.seconds == pytest.approx(3 * DEPTH * 1e-3)
    assert found.computed == pytest.approx(found.seconds)
    assert sum(found.exposed.values()) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", ["zero3", "mics", "paro-iig", "ddp", "zero++"])
def test_a_slow_cable_leaves_what_it_carries(name: str) -> None:
    """Where everything waits for one cable, the step takes what its bytes do: within 5 %, since the cable is idle while
    nodes share out what came."""
    topology = Topology(2, 2)
    slow = hardware(topology, cable=1e6, inside=1e15)
    made = strategy(name, topology)

    found = replayed(made, slow, compute=1e-9)

    carried = schedule(made, UNITS, 1).cable_bytes(0)
    assert found.seconds == pytest.approx(carried / 1e6, rel=0.05)


def test_transfers_overlap_with_what_is_computed() -> None:
    """Slow enough to be seen, quick enough to be hidden: only the first gathers and the last reductions are exposed."""
    topology = Topology(2, 2)
    made, on = strategy("zero3", topology), hardware(topology, cable=1e8)
    one = replayed(made, on, compute=1e-9).seconds / (3 * DEPTH)  # about what a unit's transfer takes

    found = replayed(made, on, compute=4 * one)

    # Exposed are two of twelve transfers, each a quarter of what a unit computes: less than a fifth, where all of them
    # would be a quarter of what is computed.
    assert sum(found.exposed.values()) < 0.2 * found.computed


def test_what_computes_and_what_moves_share_the_cores_where_these_do_both() -> None:
    """Four ranks on two cores take twice as long; bytes that the cores move take from what computes."""
    topology = Topology(2, 2)
    apart = hardware(topology, cable=1e18, inside=1e18)
    shared = replace(apart, cores=2.0, ranks_sharing=4)

    plain = replayed(strategy("zero3", topology), shared)
    moving = replayed(strategy("zero3", topology), replace(shared, inter=Link(1e18, 0.0, work=1e-8)))

    assert plain.seconds == pytest.approx(2 * replayed(strategy("zero3", topology), apart).seconds)
    bytes_moved = schedule(strategy("zero3", topology), UNITS, 1).inter_bytes
    assert moving.seconds == pytest.approx(plain.seconds + bytes_moved * 1e-8 / 2, rel=0.1)


def test_what_waits_instead_of_computing_leaves_the_cores_to_others() -> None:
    """Four ranks on two cores: only the share of their seconds in which a processor works counts twice."""
    shared = replace(hardware(Topology(2, 2), cable=1e15, inside=1e15), cores=2.0, ranks_sharing=4)
    made = strategy("ddp", Topology(2, 2))
    took = [replayed(made, shared, 1.0, share=share).seconds for share in (1.0, 0.5, 0.0)]
    assert took == pytest.approx([2 * 3 * DEPTH, 3 * DEPTH, 3 * DEPTH], rel=1e-3)


def test_every_legal_placement_replays() -> None:
    topology = Topology(2, 4)
    for placement in legal_placements(topology, copies=True):
        found = replayed(Strategy(topology, placement), hardware(topology, latency=1e-6), micro_steps=2)
        assert found.seconds >= 2 * 3 * DEPTH * 1e-3, placement
