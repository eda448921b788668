"""The communicators of NCCL that a strategy needs: few, shared by ranks and lane, and counted as memory."""

from __future__ import annotations

import pytest

import towpath
from towpath import Extent, Topology
from towpath.core.formats import Precision
from towpath.core.queues import COMMUNICATOR_BYTES, communicators, lane_of
from towpath.core.routes import Form
from towpath.core.schedule import schedule
from towpath.core.strategy import WITH_TRANSPORT
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec

SHAPES = [Topology(2, 2), Topology(2, 8), Topology(8, 8)]
UNITS = (
    UnitSpec("", (BucketSpec((1 << 20,)),), kept=True),
    UnitSpec("a", (BucketSpec((1 << 20,)), BucketSpec((1 << 16,), trainable=False))),
)
AT_MOST = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2}


def needed(strategy: towpath.Strategy, frozen: bool) -> set[tuple[tuple[int, ...], str]]:
    """With those of full parameters and of an optimizer that needs full matrices, which the parent serves if it can."""
    buckets = slice(None) if frozen else slice(1)
    units = [UnitSpec(u.name, u.buckets[buckets], u.kept) for u in UNITS]
    plans = [plan_unit(strategy, unit, Precision(), Form.COLLECTIVES) for unit in units]
    found = communicators(t for p in plans for kind in WITH_TRANSPORT for t in p.transfers(kind))
    for move in strategy.moves.assemble:
        ranks = move.groups[0].ranks
        lanes = {lane_of(queue, ranks, strategy.topology) for queue in ("control", "to owners", "from owners")}
        found |= {(ranks, lane) for lane in lanes if len(move.groups) > 1}
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", towpath.strategies())
def test_presets_need_two_communicators_or_three(name: str, shape: Topology) -> None:
    assert len(needed(towpath.strategy(name, shape), frozen=False)) <= AT_MOST.get(name, 3)


@pytest.mark.parametrize("name", ["mics", "hpz", "paro-iig", "paro-igg", "zero++"])
def test_frozen_parameters_need_no_more(name: str) -> None:
    inside = towpath.strategy(name, SHAPES[2], frozen=Extent(8))
    assert len(needed(inside, frozen=True)) == 3


def test_placements_of_lins_need_at_most_six_without_a_copy() -> None:
    placed = towpath.strategy("lins", SHAPES[2], params=Extent(4), grads=Extent(8), optimizer=Extent(8, 8))
    assert len(needed(placed, frozen=False)) <= 6


def test_columns_are_shared_by_both_lanes_where_there_are_rows() -> None:
    found = needed(towpath.strategy("paro-iig", Topology(4, 2)), frozen=False)
    assert found == {((0, 1), "gather"), ((0, 1), "reduce"), ((0, 2, 4, 6), "columns")}
    found = needed(towpath.strategy("zero3", Topology(4, 1)), frozen=False)
    assert found == {((0, 1, 2, 3), "gather"), ((0, 1, 2, 3), "reduce")}


def test_their_memory_is_counted_where_nccl_takes_it() -> None:
    strategy = towpath.strategy("zero++", SHAPES[2])
    calls, messages = (schedule(strategy, UNITS, 1, form=form) for form in (Form.COLLECTIVES, Form.MESSAGES))
    assert calls.buffer_bytes()["communicators"] == (3 + 1) * COMMUNICATOR_BYTES
    assert "communicators" not in messages.buffer_bytes()
