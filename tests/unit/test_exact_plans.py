"""Exact transports in plans: where they pay they are chosen, priced as measured, and named with what is expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.profiles import made_profile
from tests.unit.test_planner import SMALL, priced_of, small_cluster
from towpath.core.formats import DIFFERENCES
from towpath.core.strategy import GRADIENTS, Strategy
from towpath.plan import tables
from towpath.plan.hardware import Cluster
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.request import BF16, Prediction, Ranking, Request
from towpath.plan.solver import Solver

SPEED = 1e9  # elements a second that a rank codes exactly


def on_gloo(gigabits: float, coded: float = 2e11) -> Cluster:
    """Ranks whose processors compute, send and encode."""
    cluster = small_cluster(inter=gigabits)
    return replace(cluster, hardware=replace(cluster.hardware, cores=4.0, ranks_sharing=2, memory_rate=16 * coded))


def solver(cluster: Cluster, **options: Any) -> Solver:
    batch = 2 * cluster.topology.world
    request = Request(batch, cluster.memory, BF16, micro_batches=(2,), checkpointing=False, **options)
    return Solver(SMALL.model("small", 256), cluster, request)


def best(found: Solver) -> Prediction:
    answer = found.solve(best=1)
    assert isinstance(answer, Ranking)
    return answer.ranked[0]


def test_a_slow_cable_gets_exact_transports_and_the_plan_names_what_it_expects() -> None:
    found = solver(on_gloo(1.0))
    first, plain = best(found), best(solver(on_gloo(1.0), exact=False))

    assert first.strategy.is_exact and not plain.strategy.is_exact
    assert first.seconds < 0.8 * plain.seconds
    assert tables.label(first.strategy) == f"{first.strategy.name} exact"
    assert 0 < first.expected_inter_bytes < 0.8 * first.inter_bytes
    (line,) = tables.exact_bits([first, plain], found)
    assert line.startswith("Exact transports lose nothing. Expected on paper: ")
    told = tables.as_json(first, found)
    assert told["expected_inter_bytes"] == first.expected_inter_bytes
    assert Strategy.from_toml(told["toml"]) == first.strategy


@pytest.mark.parametrize("gigabits, coded", [(1000.0, SPEED), (1.0, 1e6)], ids=["fast cable", "slow coder"])
def test_where_coding_takes_longer_than_it_saves_transports_stay_as_they_are(gigabits: float, coded: float) -> None:
    found = solver(on_gloo(gigabits, coded))
    assert not any(candidate.exact for candidate in found.candidates)
    assert best(solver(on_gloo(gigabits, coded), exact=True)).strategy.is_exact
    assert not tables.exact_bits([best(found)], found)


def test_backends_that_cannot_encode_sums_only_get_exact_parameter_syncs() -> None:
    """Three ranks, so that buckets are padded."""
    found = solver(small_cluster(3, 1, inter=1.0), exact=True)
    assert any(found.candidates.strategy(candidate).param_sync.exact for candidate in found.candidates)
    for candidate in found.candidates:
        made = found.candidates.strategy(candidate)
        assert not any(made.transport(kind).exact for kind in GRADIENTS), candidate


@pytest.mark.parametrize(
    "cluster, exact",
    [
        (on_gloo(4.0), None),
        (small_cluster(inter=1.0), None),
        pytest.param(on_gloo(4.0), True, marks=pytest.mark.parity),
    ],
    ids=["gloo", "nccl", "required"],
)
def test_both_forms_take_no_less_than_their_bounds_and_the_best_is_found(cluster: Cluster, exact: bool | None) -> None:
    found = solver(cluster, exact=exact)
    candidates = list(found.candidates)
    assert {c.exact for c in candidates} == ({True} if exact else {False, True})
    priced = [(priced_of(found, candidate), candidate) for candidate in candidates]
    for each, candidate in priced:
        assert found.bound(candidate)[0] <= each.seconds * (1 + 1e-9), candidate
        assert found.peak_bytes(candidate) == each.peak_bytes, candidate
    answer = found.solve(best=1, most=10_000)
    assert isinstance(answer, Ranking) and answer.proven
    assert answer.ranked[0].seconds == min(each.seconds for each, _ in priced)


def test_stages_send_their_gradients_exactly_where_that_is_faster() -> None:
    shape = replace(SMALL, depth=8)

    def planned(gigabits: float, exact: bool | None) -> Any:
        cluster = on_gloo(gigabits).on(4, 1)  # the copies of a stage are on different nodes
        request = Request(8, cluster.memory, BF16, micro_batches=(2,), checkpointing=False, exact=exact)
        pipelines = Pipelines(lambda count: shape.staged("small", 256, count), cluster, request)
        return pipelines.solve([Layout(2)], best=1)[0]

    slow, without = planned(0.5, None), planned(0.5, False)
    assert slow.strategy.is_exact and slow.seconds < without.seconds and str(slow.layout).endswith(" exact")
    assert slow.saved_inter_bytes and not without.saved_inter_bytes


# --- what was measured ------------------------------------------------------------------------------------------------


def test_a_profile_has_the_speed_of_exact_codecs_and_older_ones_an_estimate() -> None:
    made = made_profile()
    copied = made.cluster().hardware.memory_rate
    assert made.cluster().hardware.codec_speed(DIFFERENCES).encode == copied / 16
    points = [
        replace(point, what=point.what.replace("int8", DIFFERENCES))
        for point in made.points
        if "code int8" in point.what
    ]
    speed = replace(made, points=(*made.points, *points)).cluster().hardware.codec_speed(DIFFERENCES)
    assert (speed.encode, speed.decode) == pytest.approx((1e9, 2e9))


# --- tables and options -----------------------------------------------------------------------------------------------
