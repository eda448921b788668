"""The thread that launches: what it costs, how it holds up a device, and what the planner makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.profiles import made_profile
from tests.unit.test_planner import TABLE
from towpath import planning
from towpath.core.costs import Launches
from towpath.core.formats import Precision
from towpath.core.passes import plain_walk
from towpath.core.presets import strategy
from towpath.core.routes import Form
from towpath.core.schedule import message_sizes_transfers
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.errors import ConfigError
from towpath.plan import catalog, profile, tables
from towpath.plan.bandwidth import Timeline
from towpath.plan.catalog import model_shape
from towpath.plan.hardware import CodecSpeed, Hardware, Launching, Link
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.profile import Point
from towpath.plan.replay import ComputeSeconds, Replay, SimulatedStage
from towpath.plan.solver import Batching, Ranking
from towpath.topology.cluster import Topology

TOPOLOGY = Topology(2, 2)
DEPTH = 4
UNITS = (
    UnitSpec("", (BucketSpec((5000, 64)),), root=True),
    *(UnitSpec(f"blocks.{i}", (BucketSpec((64 * 64, 64, 64 * 64)),)) for i in range(DEPTH)),
)
FAST = Hardware(
    TOPOLOGY,
    Link(1e12, 0.0),
    Link(1e12, 0.0),
    memory_rate=1e15,
    sum_rate=1e15,
    codecs=tuple((name, CodecSpeed(1e12, 1e12)) for name in ("int8", "int4")),
)
COSTS = Launching()


def replayed(
    name: str, launching: Launching | None, compute: float, micro_steps: int = 1, exact: bool = False
) -> Timeline:
    made = strategy(name, TOPOLOGY, exact=exact)
    plans = [plan_unit(made, unit, Precision(), Form.COLLECTIVES) for unit in UNITS]
    seconds = ComputeSeconds([0.0] + [compute] * DEPTH, [0.0] + [2 * compute] * DEPTH, 0.0, 0.0)
    stage = SimulatedStage(made, plans, seconds)
    return Replay([stage], replace(FAST, launching=launching), micro_steps=micro_steps).run().ranks[0]


def times(costs: Launching, factor: float) -> Launching:
    return Launching(*(factor * getattr(costs, name) for name in Launching.__slots__))


@pytest.mark.parametrize("name", ["zero3", "mics", "paro-iig", "zero++"])
def test_launching_is_free_behind_longer_computation(name: str) -> None:
    free, launched = replayed(name, None, 0.1), replayed(name, COSTS, 0.1)
    assert launched.launching > 0
    assert free.launching == free.unlaunched == 0
    # Only what comes before the first computation and after the last one shows.
    assert free.seconds < launched.seconds < free.seconds + 3e-3


@pytest.mark.parametrize("name", ["zero3", "mics", "paro-iig", "zero++"])
def test_launching_bounds_a_step_of_short_computation(name: str) -> None:
    found = replayed(name, COSTS, 1e-6)
    assert found.seconds == pytest.approx(found.launching, rel=0.02)
    assert found.unlaunched > 0.9 * found.seconds
    assert replayed(name, times(COSTS, 3), 1e-6).seconds == pytest.approx(3 * found.seconds, rel=0.02)


def test_the_thread_waits_for_agreed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device encodes first, and the parameter syncs come after the agreement."""
    monkeypatch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
    plain, exactly = (replayed("paro-iig", COSTS, 0.1, exact=encoded) for encoded in (False, True))
    agreed = {e.kind: e for e in exactly.events if e.kind is not None}
    first = min(e.start for e in exactly.events if e.kind is TransferKind.PARAM_SYNC)
    assert 0 < agreed[TransferKind.MESSAGE_SIZES].end <= first
    assert exactly.exposed[TransferKind.MESSAGE_SIZES] > 0 and exactly.launching > plain.launching
    assert exactly.inter_bytes - plain.inter_bytes == sum(t.inter_bytes for t in agreed_sizes())
    assert TransferKind.MESSAGE_SIZES not in {e.kind for e in plain.events}


def agreed_sizes() -> tuple[Transfer, ...]:
    made = strategy("paro-iig", TOPOLOGY, exact=True)
    return message_sizes_transfers(made, [plan_unit(made, unit, Precision(), Form.COLLECTIVES) for unit in UNITS])


def test_a_cluster_file_says_what_launches_cost() -> None:
    assert catalog.from_table("a", TABLE).hardware.launching == Launching()
    told = catalog.from_table("a", TABLE | {"launch": {"call": 70, "unit": 150.5}}).hardware.launching
    assert told == replace(Launching(), call=70e-6, unit=150.5e-6)
    with pytest.raises(ConfigError, match=r"\[launch\] unknown key 'calls'"):
        catalog.from_table("a", TABLE | {"launch": {"calls": 70}})


def test_a_profile_of_processors_has_no_launching_thread() -> None:
    assert made_profile().cluster().hardware.launching is None


def test_a_profile_of_devices_has_the_measured_launches() -> None:
    made = made_profile()
    points = (*made.points, Point(profile.LAUNCHED_CALL, 1, (50e-6,)))
    found = replace(made, device="cuda", points=points).cluster().hardware.launching
    assert found == Launching(call=50e-6)
    assert found.of(Launches(calls=1, together=8)) == pytest.approx(50e-6 + 8 * found.kernel)


# --- the planner -----------------------------------------------------------------------------------------------------


def solver(slower: float, **options: int) -> planning.Solver:
    made = planning.load_cluster("h100-400g", nodes=2)
    costs = made.hardware.launching
    assert costs is not None
    made = replace(made, hardware=replace(made.hardware, launching=times(costs, slower)))
    request = planning.Request(batch=64, memory=made.memory, checkpointing=False, **options)
    return planning.Solver(planning.describe_model("gpt-2.5b"), made, request)


def test_a_plan_that_launches_longer_than_it_computes_ranks_last() -> None:
    found = solver(0.5).solve(best=60)
    assert isinstance(found, Ranking)
    late = [step.is_launch_bound for step in found.ranked]
    assert not late[0]
    assert late == sorted(late)
    assert any(late)
    assert f"{sum(late)} of {len(late)}, ranked last" in tables.launches(found.ranked)[0]


def test_many_micro_steps_launch_as_much_as_each_of_them() -> None:
    made = solver(50.0)
    few, many = (made.predict(strategy("zero3", made.cluster.topology), Batching(1, n)) for n in (3, 30))
    assert many.launching == pytest.approx(10 * few.launching, rel=0.05)
    assert many.seconds == pytest.approx(many.launching, rel=0.02)


def test_the_ranks_of_a_pipeline_have_a_launching_thread_each() -> None:
    free, slow = solver(1e-3), solver(50.0)
    shape, called, tokens = model_shape("gpt-2.5b", None)
    layout, batching = Layout(2, "1F1B", "ddp"), Batching(1, 4)
    found = [
        Pipelines(lambda n: shape.staged(called, tokens, n), s.cluster, s.request, plain_walk).predict(layout, batching)
        for s in (free, slow)
    ]
    assert found[1].seconds > 10 * found[0].seconds
    assert found[1].is_launch_bound
    assert found[1].unlaunched > 0.5 * found[1].seconds
