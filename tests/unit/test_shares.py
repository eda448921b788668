"""Shares of unequal ranks: how rows are divided, when measured shares change, and where they are set."""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import pytest

import towpath
from towpath import Topology
from towpath.core.presets import parse_strategy
from towpath.core.schedule import schedule
from towpath.core.shares import DRIFT, adapted_rows, divided_rows, shares_of
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.units import units_from_numels
from towpath.engine.compute_clock import WARM_UP, WINDOW, ComputeClock
from towpath.errors import ConfigError
from towpath.observe.record import Record
from towpath.train.config import Config

# --- rows -------------------------------------------------------------------------------------------------------------


def slowest(rows: Any, seconds: Any) -> float:
    return max(row * each for row, each in zip(rows, seconds, strict=True))


@pytest.mark.parametrize(
    ("speeds", "total", "rows"),
    [
        ((2, 2, 1, 1), 12, (4, 4, 2, 2)),
        ((3, 3, 1, 1), 16, (6, 6, 2, 2)),
        ((1, 1, 1, 1), 8, (2, 2, 2, 2)),
        ((100, 1), 4, (3, 1)),  # nobody goes without a row
        ((0.5, 0.25), 3, (2, 1)),
        ((1,), 5, (5,)),
    ],
)
def test_rows_are_in_proportion_to_speed(speeds: Any, total: int, rows: Any) -> None:
    assert divided_rows(speeds, total) == rows


def test_no_other_division_has_a_faster_slowest_rank() -> None:
    draw = random.Random(1)
    for _ in range(60):
        seconds, total = [draw.uniform(0.2, 3) for _ in range(3)], draw.randint(3, 12)
        rows = divided_rows([1 / each for each in seconds], total)
        others = (each for each in itertools.product(range(1, total + 1), repeat=3) if sum(each) == total)
        assert sum(rows) == total and min(rows) >= 1
        assert slowest(rows, seconds) == min(slowest(each, seconds) for each in others)


def test_a_micro_batch_with_fewer_rows_than_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 rows for 4 ranks"):
        divided_rows((1, 1, 1, 1), 3)


# --- measured shares --------------------------------------------------------------------------------------------------


def test_rows_change_once_it_is_worth_it() -> None:
    even, seconds = (4, 4, 4, 4), (1.0, 1.0, 2.0, 2.0)
    rows = adapted_rows(even, seconds)
    assert slowest(rows, seconds) == 6.0  # 16 rows cannot be divided into thirds
    assert adapted_rows(rows, seconds) == rows
    # Rounding alone changes nothing, and neither does a division that gains nothing.
    assert adapted_rows(even, (1.0, 1.01, 0.99, 1.0)) == even
    assert adapted_rows((1, 1), (1.0, 2.0)) == (1, 1)


@pytest.mark.parametrize(("change", "adapts"), [(1 + 0.9 * DRIFT, False), (1 + 1.1 * DRIFT, True), (0.85, True)])
def test_settled_rows_change_if_a_rank_has_drifted(change: float, adapts: bool) -> None:
    before, rows = (1.0,) * 4, (25,) * 4
    assert (adapted_rows(rows, (1.0, 1.0, 1.0, change), before) != rows) is adapts


@pytest.mark.parametrize("fixed", [0.0, 0.5, 2.0])
def test_rows_settle_within_five_percent_of_the_best(fixed: float) -> None:
    """Also where a rank needs some seconds for any number of rows, and measured ones are off by a percent."""
    draw, worst = random.Random(2), 0.0
    for _ in range(40):
        speeds = [draw.uniform(1, 4) for _ in range(4)]
        rows = (16,) * 4

        def times(rows: Any, speeds: Any = speeds) -> list[float]:
            return [(fixed + row) / speed for row, speed in zip(rows, speeds, strict=True)]

        for _ in range(2):
            noisy = [t / row * draw.uniform(0.99, 1.01) for t, row in zip(times(rows), rows, strict=True)]
            rows = adapted_rows(rows, noisy)
        others = itertools.product(range(-2, 3), repeat=4)
        near = (tuple(a + b for a, b in zip(rows, other, strict=True)) for other in others if sum(other) == 0)
        best = min(max(times(each)) for each in near if min(each) > 0)
        worst = max(worst, max(times(rows)) / best)
    assert worst <= 1.05


# --- the clock --------------------------------------------------------------------------------------------------------


class Marks:
    """A timer whose marks are numbers that the test sets. Marks after `known` are those of a device that is behind."""

    is_free = False

    def __init__(self) -> None:
        self.now, self.known = 0.0, 0.0

    def mark(self) -> float:
        return self.now

    def is_known(self, mark: float) -> bool:
        return mark <= self.known

    def seconds(self, began: float, ended: float) -> float:
        return ended - began

    def host_seconds(self, began: float, ended: float) -> float:
        return 0.0


def made_clock() -> tuple[ComputeClock, Marks, Record]:
    marks = Marks()
    record = Record(cast(Any, None), cast(Any, marks))
    return ComputeClock(record), marks, record


def step(
    clock: ComputeClock, marks: Marks, record: Record, forward: float, backward: float, waits: float = 0.0
) -> None:
    clock.begin()
    clock.begin()  # of a unit inside
    marks.now += forward
    clock.end()
    marks.now += 100.0  # what the loop does between the passes
    record.waited((), marks.now - 50, marks.now)
    clock.begin()
    assert record.is_timed(()) or not clock.is_running
    record.waited((), marks.now, marks.now + waits)
    marks.now += backward + waits
    clock.end()


def test_the_clock_leaves_out_waits_and_the_first_steps() -> None:
    clock, marks, record = made_clock()
    for _ in range(WARM_UP):
        step(clock, marks, record, 50.0, 50.0)
        assert clock.end_step(8) == 0.0
    marks.known = float("inf")
    found = []
    for number in range(WINDOW):
        step(clock, marks, record, 1.0, 2.0 if number else 200.0, waits=7.0)
        found.append(clock.end_step(6))
    assert found[:-1] == [0.0] * (WINDOW - 1)
    assert found[-1] == pytest.approx(0.5)  # the median: one step was far slower
    clock.restart(after=1)
    step(clock, marks, record, 9.0, 9.0)
    assert clock.end_step(1) == 0.0 and not clock.is_running


def test_the_clock_reads_no_mark_that_the_device_has_not_passed() -> None:
    clock, marks, record = made_clock()
    for _ in range(WARM_UP + WINDOW + 3):
        step(clock, marks, record, 1.0, 2.0, waits=1.0)
        assert clock.end_step(3) == 0.0
    marks.known = marks.now
    assert clock.end_step(0) == pytest.approx(1.0)


def test_a_step_that_is_dropped_and_the_engines_own_work_do_not_count() -> None:
    clock, marks, record = made_clock()
    marks.is_free, marks.known = True, float("inf")
    for _ in range(WARM_UP):
        clock.end_step(1)
    found = 0.0
    for _ in range(WINDOW):
        step(clock, marks, record, 30.0, 30.0)
        clock.drop_step()
        clock.begin()
        marks.now, record.host.seconds = marks.now + 3.0, record.host.seconds + 1.0
        clock.end()
        record.host.seconds += 5.0  # outside
        found = clock.end_step(2)
    assert found == pytest.approx(1.0)


# --- where they are set -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["2,2,1,1", (2, 2, 1, 1), [2, 2, 1, 1]])
def test_shares_are_numbers_or_their_text(value: Any) -> None:
    assert shares_of(value) == (2, 2, 1, 1)
    assert shares_of("0.5,1") == (0.5, 1)


WRONG = ["fast", "2,,1", "2;1", "1..5", "", (), (0, 1), (-1, 1), (True, 1), (float("inf"),), 2]


@pytest.mark.parametrize("value", WRONG)
def test_other_shares_are_refused_with_an_example(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"shares=.*such as \(2, 2, 1, 1\)"):
        shares_of(value)


@pytest.mark.parametrize("shares", [(2, 2, 1, 1), "auto"])
def test_shares_are_part_of_a_strategy_and_survive_toml(shares: Any) -> None:
    made = towpath.strategy("paro-iig", Topology(2, 2), shares=shares)
    assert Strategy.from_toml(made.to_toml()) == made and made.shares == shares
    text = shares if shares == "auto" else "2,2,1,1"
    assert parse_strategy(f"paro-iig shares={text}", Topology(2, 2)) == made
    assert "measured" in str(made) or "2, 2, 1, 1" in str(made)
    assert towpath.strategy("zero3", Topology(2, 2)).shares is None


def test_what_ranks_tell_is_in_the_schedule() -> None:
    def compared(**options: Any) -> int:
        made = schedule(towpath.strategy("zero3", Topology(2, 2), **options), units_from_numels([100, 100]), 1)
        return sum(t.elements for t in made.transfers if t.kind is TransferKind.UNUSED_PARAMS)

    assert compared(shares="auto") == compared(shares=(1, 1, 2, 2)) == compared() + 4 * 24


def test_a_file_for_training_sets_shares() -> None:
    def built(**strategy: Any) -> Any:
        return Config.from_dict({"strategy": strategy}).strategy.build(Topology(2, 2)).shares

    assert built(name="mics", shares="2,2,1,1") == (2, 2, 1, 1)
    assert built(name="mics", shares="auto") == "auto" and built(name="mics") is None
    with pytest.raises(ConfigError, match=r"strategy.shares='quick': expected a number above 0"):
        built(name="mics", shares="quick")
    for which in ("pipeline", "tensor"):
        with pytest.raises(ConfigError, match=f"strategy.shares = 'auto': expected none with parallel.{which} = 2"):
            Config.from_dict({"strategy": {"shares": "auto"}, "parallel": {which: 2}})
