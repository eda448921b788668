"""The suites of outer steps: which steps have an exchange, and what their figures and tables are."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import islands, torchft_peer
from benchmarks.islands import OuterSpec, begun_in, by_step, mean_step, under_way_in
from benchmarks.suites import outer, outer_quality, outer_time
from benchmarks.suites.quality import SETTING
from towpath import Outer, Topology

SQUARE = Topology(2, 2)


class TestSteps:
    @pytest.mark.parametrize(
        ("settings", "within"),
        [
            (Outer(8), [9, 17]),
            (Outer(8, delay=2), [9, 10, 11, 17, 18, 19]),
            (Outer(8, fragments=2, delay=1), [5, 6, 9, 10, 13, 14, 17, 18]),
            (Outer(4, delay=3), list(range(5, 21))),
        ],
        ids=str,
    )
    def test_an_exchange_is_under_way_from_the_step_after_its_own_to_the_one_that_applies_it(
        self, settings: Outer, within: list[int]
    ) -> None:
        assert [step for step in range(1, 21) if under_way_in(settings, step)] == within

    def test_an_exchange_begins_in_the_step_after_its_own(self) -> None:
        assert [step for step in range(1, 20) if begun_in(Outer(8, delay=3), step)] == [9, 17]

    def test_stretches_are_whole_periods(self) -> None:
        assert outer.stretches(Outer(8), 9, 16) == [(True, 1), (False, 7), (True, 1), (False, 7)]
        assert outer.stretches(Outer(4, delay=3), 5, 8) == [(True, 8)]

    def test_the_last_rank_decides_the_mean_step(self) -> None:
        ranks = [[1.0, 1.0], [1.0, 2.0]]
        assert mean_step(ranks) == 1.5
        assert by_step(ranks) == [1.0, 1.5]

    def test_names_have_what_differs(self) -> None:
        assert str(OuterSpec()) == "int4, every 32"
        assert str(OuterSpec("fp32", 8, 4, 2, 0.5)) == "fp32, every 8, 4 fragments, delay 2, blend 0.5"


class TestBytes:
    SETTINGS = replace(islands.outer_of(OuterSpec().strategy(SQUARE)))

    def test_bytes_of_exchanges_are_compared_with_the_schedule(self) -> None:
        found = [(True, 1, 1010), (False, 31, 31)] * 2
        between, scheduled, average = outer.bytes_checks(self.SETTINGS, found, 1000, 5000)
        assert between.found == 1 / 5000 and between.met
        assert scheduled.found == 1.01 and scheduled.met
        assert average.found == pytest.approx(1041 / 32 / 5000) and average.at_most == 0.01

    def test_missing_bytes_are_no_success(self) -> None:
        _, scheduled, _ = outer.bytes_checks(self.SETTINGS, [(True, 1, 900), (False, 31, 0)], 1000, 5000)
        assert not scheduled.met

    def test_only_the_usual_period_in_int4_has_a_limit_on_average(self) -> None:
        for spec, topology in (
            (OuterSpec("fp32"), SQUARE),
            (OuterSpec(every=8), SQUARE),
            (OuterSpec(), Topology(4, 1)),
        ):
            settings = islands.outer_of(spec.strategy(topology))
            *_, average = outer.bytes_checks(settings, [(True, settings.every, 10)], 10, 10)
            assert average.at_most is None


class TestOverlap:
    def test_steps_with_an_exchange_are_compared_with_those_without(self) -> None:
        delay, means, medians, begins = outer.overlap_checks(Outer(4, delay=1), [1.2, 1.0, 1.0, 1.0] * 2)
        assert delay.found == 1
        assert means.found == pytest.approx(1.1) and not means.met
        assert medians.found == pytest.approx(1.1) and medians.met is None
        assert begins.found == pytest.approx(1.2)

    def test_without_a_step_alone_there_is_nothing_to_compare_with(self) -> None:
        assert len(list(outer.overlap_checks(Outer(4, delay=3), [1.0] * 8))) == 1

    def test_the_shortest_delay_is_as_good_as_the_longest(self) -> None:
        def seconds(strategy: Any) -> float:
            return 1.0 + max(0, 5 - strategy.outer.delay) / 10

        plan: Any = SimpleNamespace(seconds=seconds)
        assert outer.shortest_delay(plan, OuterSpec(), SQUARE) == 5


def test_the_mean_error_is_that_of_all_cases() -> None:
    lines = {name: {"checks": [{"found": error}]} for name, error in (("a", 0.02), ("b", 0.12))}
    check = outer.mean_error({**lines, "failed": {"checks": []}})
    assert check is not None and check.found == pytest.approx(0.07) and check.met
    assert outer.mean_error({}) is None


# Time -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "steps"), [(3.0, 32.0), (3.5, 16.0), (2.5, 80.0), (4.5, 0.0), (1.0, math.inf)], ids=str
)
def test_the_steps_until_a_loss_are_between_two_validations(loss: float, steps: float) -> None:
    assert outer_time.steps_until([(0, 4.0), (32, 3.0), (64, 3.1), (96, 1.9)], loss) == pytest.approx(steps, abs=0.1)


def trained(candidate: str, seed: int, curve: list[tuple[int, float]]) -> dict[str, Any]:
    case = {"candidate": candidate, "seed": seed, "name": f"{candidate}, seed {seed}"}
    return {"case": case, "setting": outer_time.SETTING, "curve": curve}


def stepped(candidate: str, inter: str, seconds: float) -> dict[str, Any]:
    case = {"candidate": candidate, "inter": inter, "name": f"{candidate} at {inter}"}
    return {"case": case, "setting": outer_time.SETTING, "mean_seconds": seconds}


OURS = "outer steps, int4"
LINES = [
    *(trained(outer_time.LOSSLESS, seed, [(0, 5.0), (400, 2.0)]) for seed in (0, 1)),
    trained(OURS, 0, [(0, 5.0), (600, 2.0), (640, 1.9)]),
    trained(OURS, 1, [(0, 5.0), (500, 2.0), (640, 1.9)]),
    stepped(outer_time.LOSSLESS, "10mbit", 9.0),
    stepped(OURS, "10mbit", 1.0),
    stepped(OURS, "50mbit", 0.9),
    {"case": {"candidate": torchft_peer.NAME, "seed": 0, "name": "torchft"}, "skipped": "it is not installed"},
]


def test_a_time_is_steps_times_the_mean_step() -> None:
    found = {(each.candidate, each.inter): each for each in outer_time.times(LINES)}
    assert found[OURS, "10mbit"].seconds == (600.0, 500.0)
    assert found[outer_time.LOSSLESS, "10mbit"].seconds == (3600.0, 3600.0)
    assert list(found) == [(OURS, "10mbit"), (outer_time.LOSSLESS, "10mbit"), (OURS, "50mbit")]
    [check] = outer_time.verdicts(list(found.values()))
    assert check.found == pytest.approx(550 / 3600) and check.met
    assert check.what == f"10mbit: {OURS} / {outer_time.LOSSLESS}, time to the loss"


def test_a_loss_that_was_not_reached_is_said() -> None:
    lines = [trained(outer_time.LOSSLESS, 0, [(0, 5.0), (400, 2.0)]), trained(OURS, 0, [(0, 5.0), (640, 2.1)])]
    [found] = outer_time.times([*lines, stepped(OURS, "10mbit", 1.0)])
    assert "minutes to the loss not reached (by seed not reached)" in str(found)


def test_a_candidate_that_is_not_installed_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_peer, "find_spec", lambda name: None)
    monkeypatch.delenv(torchft_peer.FOLDER, raising=False)
    settings: Any = SimpleNamespace(quick=True)
    for case in outer_time.CASES:
        if case.candidate == torchft_peer.NAME:
            assert "benchmarks/torchft.txt" in case.measure(settings)["skipped"]
    assert outer_time.skipped(OURS) is None


def test_seed_0_comes_first() -> None:
    assert [case.seed for case in outer_quality.RUNS] == sorted(case.seed for case in outer_quality.RUNS)
    seeds = [getattr(case, "seed", 0) for case in outer_time.CASES]
    assert seeds == sorted(seeds)


# Quality --------------------------------------------------------------------------------------------------------------


def test_all_variants_but_one_differ_from_the_center_in_one_setting() -> None:
    center = outer_quality.VARIANTS[outer_quality.CENTER]
    for name, variant in outer_quality.VARIANTS.items():
        assert variant.strategy.job.world == 4
        if variant.spec is None or center.spec is None or name == outer_quality.CENTER:
            continue
        settings = [getattr(variant, each) != getattr(center, each) for each in ("topology", "muon", "shift")]
        for each in ("codec", "every", "fragments", "delay", "blend", "optimizer"):
            settings.append(getattr(variant.spec, each) != getattr(center.spec, each))
        assert sum(settings) == (2 if name == "delay 8, blend 0.5" else 1), name


def test_muon_is_judged_against_synchronous_muon() -> None:
    final = {outer_quality.BASELINE: 2.0, "center": 2.02, outer_quality.MUON: 1.8, "Muon": 1.89}
    runs = [
        {"case": {"variant": name, "seed": seed}, "final": loss, "setting": SETTING}
        for name, loss in final.items()
        for seed in (0, 1)
    ]
    rows = {row.variant: row.mean for row in outer_quality.rows_of(runs)}
    assert rows == pytest.approx({"center": 0.01, outer_quality.MUON: -0.1, "Muon": 0.05})
