"""Collectives that a probe measured: which ones, and what they change in the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.profiles import made_profile
from towpath.core.formats import Precision
from towpath.core.placement import legal_placements
from towpath.core.routes import ROUTES, Form, Grid, Op
from towpath.core.strategy import WITH_TRANSPORT, Strategy
from towpath.core.transport import Transport
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.plan.cluster_probe import planned_collectives
from towpath.plan.hardware import GroupMesh, Hardware, interpolated
from towpath.plan.profile import Point, Profile, collective_name, parse_collective_name
from towpath.plan.transfer_costs import MoveShape, TransferShape, move_shapes, phase_costs, seconds_alone
from towpath.topology.cluster import Topology

SIZES = (1 << 16, 1 << 20)
SQUARE = GroupMesh(Grid(2, 2))


def profile(route: str = "flat", seconds: tuple[float, ...] = (0.02, 0.3), op: str = Op.ALL_REDUCE.value) -> Profile:
    made = made_profile()
    points = [Point(collective_name(op, SQUARE, route), s, (t,)) for s, t in zip(SIZES, seconds, strict=True)]
    return replace(made, points=(*made.points, *points))


def alone(hardware: Hardware, size: int, op: Op = Op.ALL_REDUCE, transport: Transport | None = None) -> float:
    shape = MoveShape(op, 1, SQUARE.grid, 1)
    of = TransferShape.of_move(shape, transport or Transport(), size // 4, "float32", hardware.form)
    return seconds_alone(phase_costs(of, hardware), hardware)


def test_ratios_are_interpolated_in_the_logarithm_of_the_size() -> None:
    ratios = [(1 << 10, 0.5), (1 << 12, 1.5), (1 << 20, 3.0)]
    assert [interpolated(ratios, size) for size, _ in ratios] == [0.5, 1.5, 3.0]
    assert interpolated(ratios, 1 << 11) == pytest.approx(1.0)
    assert interpolated(ratios, 1 << 16) == pytest.approx(2.25)
    # Outside the measured sizes: below, in proportion; above, what one measured more stays as it is.
    assert interpolated(ratios, 1) == 0.5
    assert interpolated(ratios, 1 << 21) == pytest.approx(2.0)  # twice the seconds, and as many more as before
    assert interpolated(ratios, 1 << 40) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("size", "seconds"), [(SIZES[0], 0.02), (SIZES[1], 0.3)])
def test_a_collective_alone_takes_what_was_measured(size: int, seconds: float) -> None:
    made = profile()
    assert alone(made.cluster(measured_collectives=True).hardware, size) == pytest.approx(seconds)
    messages = made.cluster(measured_collectives=False).hardware
    assert messages.measured is None and alone(messages, size) != pytest.approx(seconds, rel=0.05)


def test_only_what_was_measured_is_corrected() -> None:
    made = profile(op=Op.ALL_GATHER.value).cluster(measured_collectives=True)
    messages = profile().cluster(measured_collectives=False).hardware
    encoded = Transport("flat", "int8")
    size = SIZES[1]

    assert alone(made.hardware, size) == alone(messages, size)  # an all-reduce
    assert alone(made.hardware, size, Op.ALL_GATHER, encoded) != alone(messages, size, Op.ALL_GATHER, encoded)
    other, same = (replace(each, topology=Topology(4, 2)) for each in (made.hardware, messages))
    assert alone(other, size, Op.ALL_GATHER) == alone(same, size, Op.ALL_GATHER)
    two_hop = Transport("two-hop", "int8")
    reduced = profile("two-hop", op=Op.REDUCE_SCATTER.value).cluster(measured_collectives=True).hardware
    assert alone(reduced, size, Op.REDUCE_SCATTER, two_hop) == alone(messages, size, Op.REDUCE_SCATTER, two_hop)


def test_a_profile_keeps_its_collectives_and_older_ones_have_none() -> None:
    made = profile()
    again = Profile.from_json(made.to_json())
    assert again == made
    assert again.cluster(measured_collectives=True).hardware == made.cluster(measured_collectives=True).hardware

    older = replace(made, points=tuple(p for p in made.points if p not in made.collectives()))
    older = replace(older, points=(*older.points, Point("all-gather by flat, all ranks", 1 << 20, (0.1,))))
    assert older.cluster(measured_collectives=True).hardware.measured is None
    assert not any(" by " in point.what for point in older.singles())


def test_names_of_collectives_are_read_as_they_were_written() -> None:
    for mesh in (SQUARE, GroupMesh(Grid(4, 1), 2), GroupMesh(Grid(1, 8))):
        for op in (op.value for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)):
            assert parse_collective_name(collective_name(op, mesh, "ho-ring")) == (op, mesh, "ho-ring")


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(4, 2), Topology(2, 4), Topology(3, 1)], ids=str)
def test_a_probe_measures_every_collective_that_a_plan_can_use(topology: Topology, form: Form) -> None:
    """Over partial meshes too, and those between replicas. No route makes another one of a plan's transfers."""
    found = planned_collectives(topology, form)
    unit = UnitSpec("block", (BucketSpec((64 * topology.world,)),))
    for placement in legal_placements(topology, copies=True):
        shapes = move_shapes(placement, topology)
        for route in ROUTES:
            kinds = [kind for kind in WITH_TRANSPORT if any(not shape.grid.plain for shape in shapes[kind])]
            transports: dict[str, Any] = {kind.value: Transport(route) for kind in kinds}
            made = Strategy(topology, placement, "", **transports)
            plan = plan_unit(made, unit, Precision(), form)
            for transfer in (t for kind in WITH_TRANSPORT for t in plan.steady_transfers(kind)):
                shape = TransferShape.of(transfer)
                assert (shape.op, GroupMesh(shape.grid, shape.stride), shape.route) in found, str(transfer)
