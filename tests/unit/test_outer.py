"""Outer steps as data: their settings, which exchange belongs to which step, and what a rank exchanges."""

from __future__ import annotations

from typing import Any

import pytest

import towpath
from towpath import Outer, Strategy, Topology, Transport
from towpath.core import formats
from towpath.core.placement import transitions
from towpath.core.schedule import schedule
from towpath.core.step_state import ApplyOuter, Submit, Wait
from towpath.core.strategy import OUTER_KINDS, TransferKind
from towpath.core.units import units_from_numels
from towpath.errors import ConfigError
from towpath.outer.exchanges import OuterPlan, OuterSteps

PRESETS = list(towpath.strategies())
UNITS = units_from_numels({"": 1000, "a": 70_000, "b": 70_000, "c": 33_000, "d": 70_000}, "float32")


def plan_of(name: str, topology: Topology, outer: Outer, **options: Any) -> OuterPlan:
    strategy = towpath.strategy(name, topology, outer=outer, **options)
    made = schedule(strategy, UNITS, 1).outer
    assert made is not None
    return made


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"every": 0}, "every"),
        ({"every": 4, "fragments": 5}, "fragments"),
        ({"every": 4, "delay": 4}, "delay"),
        ({"every": 4, "lr": -1.0}, "lr"),
        ({"every": 4, "momentum": 1.0}, "momentum"),
        ({"every": 4, "blend": 1.0}, "blend"),
        ({"every": 4, "islands": 0}, "islands"),
        ({"every": 4, "meet": "a"}, "meet"),
        ({"every": 4, "meet": "a:1,b:65536"}, "meet"),
        ({"every": 4, "meet": "[::1]:29600"}, "a name or an IPv4 address"),
        ({"every": 4, "meet": "a:1,2001:db8::1:29600"}, "a name or an IPv4 address"),
        ({"every": 4, "transport": Transport("flat", exact=True)}, "exact"),
        ({"every": 4, "transport": Transport("flat", "int8", until=5)}, "until"),
        ({"every": 4, "transport": Transport("flat", "low-rank:4")}, "low-rank"),
        ({"every": 4, "transport": Transport("ring", "int8")}, "ring"),
        ({"every": 4, "transport": Transport("flat", "int4+stochastic")}, "random"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Outer(**settings)


def test_few_bits_need_error_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats._registered, "pair", 2)
    Outer(every=4, transport=Transport("flat", "int4"))
    with pytest.raises(ConfigError, match="feedback='all'"):
        Outer(every=4, transport=Transport("flat", "pair"))
    Outer(every=4, transport=Transport("flat", "pair", feedback="all"))


def test_islands_are_groups_of_whole_nodes() -> None:
    made = towpath.strategy("zero3", Topology(4, 2), outer=Outer(every=4))
    assert (made.islands, made.topology, made.job) == (4, Topology(1, 2), Topology(4, 2))
    made = towpath.strategy("zero3", Topology(4, 2), outer=Outer(every=4, islands=2))
    assert (made.islands, made.topology, made.job) == (2, Topology(2, 2), Topology(4, 2))
    racks = Topology(8, 2, nodes_per_rack=4)
    made = towpath.strategy("zero3", racks, outer=Outer(every=4, islands=4))
    assert (made.topology, made.job) == (Topology(2, 2), racks)
    with pytest.raises(ConfigError, match="whole nodes"):
        towpath.strategy("zero3", Topology(2, 4), outer=Outer(every=4, islands=4))
    with pytest.raises(ConfigError, match="islands"):
        Strategy(Topology(2, 2), made.placement, outer=Outer(every=4))


def test_outer_steps_on_a_single_node_are_left_out_with_a_warning() -> None:
    topology = Topology(1, 4)
    with pytest.warns(UserWarning, match=r"1 node of 4 ranks is one island.*Training is synchronous"):
        made = towpath.strategy("zero3", topology, outer=Outer(every=4))
    assert made == towpath.strategy("zero3", topology)
    made = towpath.strategy("zero3", topology, outer=Outer(every=4, islands=1))  # meant so
    assert made.outer is not None and made.islands == 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_strategy_with_outer_steps_can_be_written_and_read(name: str) -> None:
    outer = Outer(8, 4, 2, 0.5, 0.8, 0.25, Transport("flat", "int4:64", feedback="all"), islands=2)
    made = towpath.strategy(name, Topology(4, 2, nodes_per_rack=2), outer=outer)

    assert Strategy.from_toml(made.to_toml()) == made
    assert "every 8 steps" in str(made)


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "fragments", "delay"), [(1, 1, 0), (3, 2, 1), (8, 3, 7), (32, 8, 4), (5, 5, 0)])
def test_each_fragment_is_exchanged_once_a_period_and_applied_by_count(every: int, fragments: int, delay: int) -> None:
    outer = Outer(every, fragments, delay)
    for first in range(1, 3 * every, every):
        begun = [f for step in range(first, first + every) for f in outer.begun_at(step)]
        assert sorted(begun) == list(range(fragments))
    for step in range(1, 4 * every):
        assert outer.fragments_applied_after(step + delay) == outer.begun_at(step)
    assert outer.begun_at(0) == outer.fragments_applied_after(delay) == ()


def test_the_machine_begins_and_applies_in_order() -> None:
    steps = OuterSteps(plan_of("zero3", Topology(2, 2), Outer(every=3, fragments=2, delay=1)))
    seen: list[list[tuple[str, int]]] = []
    for step in range(1, 8):
        found: list[tuple[str, int]] = []
        for action in steps.advance(step):
            match action:
                case Submit(task):
                    found.append(("begin", task.unit))
                case Wait(task, on_host):
                    assert not on_host  # the device computes with the result
                    found.append(("wait", task.unit))
                case ApplyOuter(fragment):
                    found.append(("apply", fragment))
                case _:
                    raise AssertionError(action)
        seen.append(found)
    end0, end1 = [("wait", 0), ("apply", 0)], [("wait", 1), ("apply", 1)]
    assert seen == [
        [("begin", 0)],
        end0,
        [("begin", 1)],
        [("begin", 0), *end1],
        end0,
        [("begin", 1)],
        [("begin", 0), *end1],
    ]
    ended = [(a.fragment, a.average) for a in steps.average() if isinstance(a, ApplyOuter)]
    assert ended == [(0, False), (0, True), (1, True)]
    assert steps.advance(8) == []  # what was applied then is not applied again


def test_steps_that_nobody_asked_about_are_caught_up_with() -> None:
    plan = plan_of("zero3", Topology(2, 2), Outer(every=2))
    one, other = OuterSteps(plan), OuterSteps(plan)
    apart = [type(a) for step in range(1, 6) for a in one.advance(step)]
    assert [type(a) for a in other.advance(5)] == apart


# --- what is exchanged -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 2, 2), (3, 1, 3), (2, 4, 1), (4, 4, 2)])
@pytest.mark.parametrize("name", PRESETS)
def test_the_ranks_of_an_island_exchange_each_element_once(name: str, shape: tuple[int, int, int]) -> None:
    nodes, ranks, islands = shape
    topology = Topology(nodes, ranks)
    plan = plan_of(name, topology, Outer(every=4, fragments=2, islands=islands))
    made, world = plan.strategy, plan.strategy.topology.world
    assert sorted(unit for fragment in plan.fragments for unit in fragment.units) == list(range(len(UNITS)))
    numels = {0: 0, 1: 0}
    for number, fragment in enumerate(plan.fragments):
        for part in fragment.parts:
            # All ranks have slices of their own, inside their slices of the optimizer states.
            finest, optimizer = part.partition, transitions(made.placement, made.topology).optimizer
            assert sorted(finest.slots) == list(range(world))
            ratio = finest.count // optimizer.count
            assert [slot // ratio for slot in finest.slots] == list(optimizer.slots)
            numels[number] += part.elements * world
            for transfer in part.exchange:
                assert transfer.elements == part.elements
                assert all(len(set(map(made.job.node_of, g.ranks))) == islands for g in transfer.move.groups)
            for transfer in part.gather:
                assert transfer.elements == part.elements * transfer.move.members
                assert all(len({rank // world for rank in g.ranks}) == 1 for g in transfer.move.groups)
    assert sum(numels.values()) >= sum(sum(b.numels) for u in UNITS for b in u.buckets)


def test_an_exchange_sends_one_copy_of_the_model_per_island() -> None:
    """With two islands, an all-reduce sends each rank's part once in each direction."""
    for name in ("ddp", "zero3", "mics", "paro-iig"):
        plan = plan_of(name, Topology(2, 2), Outer(every=4))
        elements = sum(part.elements for fragment in plan.fragments for part in fragment.parts) * 2
        compared = sum(t.inter_bytes for t in plan.transfers if t.kind is TransferKind.SLOW_WEIGHTS)
        assert plan.inter_bytes - compared == 2 * 4 * elements
        assert compared <= 2 * 2 * 16
        assert plan.mean_inter_bytes == plan.inter_bytes / 4
        assert plan.peak_inter_bytes == plan.inter_bytes


def test_the_schedule_of_a_step_between_exchanges_sends_nothing_between_islands() -> None:
    made = schedule(towpath.strategy("zero3", Topology(4, 2), outer=Outer(every=4, islands=2)), UNITS, 2)
    assert made.outer is not None
    assert not {t.kind for t in made.transfers} & set(OUTER_KINDS)
    for transfer in made.transfers:
        assert transfer.topology == Topology(4, 2)
        assert all(len({rank // 4 for rank in group.ranks}) == 1 for group in transfer.move.groups)
    alone = schedule(towpath.strategy("zero3", Topology(2, 2)), UNITS, 2)
    assert made.inter_bytes == 2 * alone.inter_bytes
    assert "outer steps" in str(made)


def test_more_fragments_than_units_are_refused() -> None:
    strategy = towpath.strategy("zero3", Topology(2, 2), outer=Outer(every=32, fragments=8))
    with pytest.raises(ConfigError, match="5 units"):
        schedule(strategy, UNITS, 1)


def test_codecs_cannot_take_the_slow_weights_of_float64() -> None:
    outer = Outer(every=4, transport=Transport("flat", "int8"))
    strategy = towpath.strategy("zero3", Topology(2, 2), outer=outer)
    with pytest.raises(ConfigError, match="float64"):
        schedule(strategy, units_from_numels({"": 10, "a": 100}, "float64"), 1)
