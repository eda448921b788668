"""The communicators of NCCL that a strategy needs: few, shared by ranks and lane, and counted as memory."""

from __future__ import annotations

from typing import Any

import pytest

import towpath
from towpath import Extent, Topology
from towpath.core.formats import Precision
from towpath.core.queues import (
    COMMUNICATOR_BYTES,
    PEER_BYTES,
    Communicator,
    CommunicatorSharing,
    communicator_bytes,
    digest_bytes,
    shared_lanes,
)
from towpath.core.routes import Form
from towpath.core.schedule import schedule
from towpath.core.strategy import WITH_TRANSPORT
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import BucketSpec, UnitSpec

SHAPES = [Topology(2, 2), Topology(2, 8), Topology(8, 8)]
UNITS = (
    UnitSpec("", (BucketSpec((1 << 20,)),), root=True),
    UnitSpec("a", (BucketSpec((1 << 20,)), BucketSpec((1 << 16,), trainable=False))),
)


def communicators(plans: list[UnitPlan]) -> set[Communicator]:
    lanes, transfers = (
        CommunicatorSharing.of(plans),
        [t for plan in plans for kind in WITH_TRANSPORT for t in plan.transfers(kind)],
    )
    return {each for transfer in transfers for each in lanes.communicators(transfer)}


def needed(strategy: towpath.Strategy, frozen: bool) -> set[tuple[tuple[int, ...], str]]:
    """With those of full parameters and of an optimizer that needs full matrices, which the parent serves if it can."""
    buckets = slice(None) if frozen else slice(1)
    units = [UnitSpec(u.name, u.buckets[buckets], u.root) for u in UNITS]
    plans = [plan_unit(strategy, unit, Precision(), Form.COLLECTIVES) for unit in units]
    found, lanes = communicators(plans), CommunicatorSharing.of(plans)
    for move in strategy.moves.assemble:
        ranks = move.groups[0].ranks
        used = {lanes.lane(queue, ranks, strategy.topology) for queue in ("control", "to owners", "from owners")}
        found |= {(ranks, lane) for lane in used if len(move.groups) > 1}
    return found


@pytest.mark.parametrize("name", ["mics", "hpz", "paro-iig", "paro-igg", "zero++"])
def test_frozen_parameters_need_no_more(name: str) -> None:
    inside = towpath.strategy(name, SHAPES[2], frozen=Extent(8))
    assert len(needed(inside, frozen=True)) == 3


def test_gathers_and_reductions_share_what_they_use_less() -> None:
    found = needed(towpath.strategy("paro-iig", Topology(4, 2)), frozen=False)
    assert found == {((0, 1), "gather"), ((0, 1), "reduce"), ((0, 2, 4, 6), "columns")}
    # Both lanes use columns in each micro-step.
    found = needed(towpath.strategy("paro-ggg", Topology(4, 2)), frozen=False)
    assert found == {((0, 1), "rows"), ((0, 2, 4, 6), "gather"), ((0, 2, 4, 6), "reduce")}
    found = needed(towpath.strategy("zero3", Topology(4, 1)), frozen=False)
    assert found == {((0, 1, 2, 3), "gather"), ((0, 1, 2, 3), "reduce")}


def test_queues_of_one_communicator_must_keep_one_order() -> None:
    def shared(name: str, form: Form = Form.COLLECTIVES) -> dict[tuple[str, int], set[str]]:
        strategy = towpath.strategy(name, Topology(64, 8))
        plans = [plan_unit(strategy, unit, Precision(), form) for unit in UNITS]
        found = shared_lanes(strategy, plans)
        # Each group has 16 bytes in the comparison at the boundary.
        assert (
            digest_bytes(strategy, found) - digest_bytes(strategy)
            == 16 * sum(len(each.ranks) for each in found)
            <= 1024
        )
        return {(each.lane, len(each.ranks)): {kind.value for kind in each.kinds} for each in found}

    assert shared("zero++") == {("rows", 64): {"gather", "backward_gather", "reduce"}}
    assert shared("paro-iig") == {("columns", 8): {"grad_sync", "param_sync"}}
    assert shared("mics") == {("gather", 64): {"gather", "backward_gather", "unused_params"}}  # with norms and the like
    assert shared("zero3") == {}  # the parent serves the norms of all ranks
    assert shared("zero++", Form.MESSAGES) == {}


def test_their_memory_is_counted_where_nccl_takes_it() -> None:
    strategy = towpath.strategy("zero++", SHAPES[2])
    calls, messages = (schedule(strategy, UNITS, 1, form=form) for form in (Form.COLLECTIVES, Form.MESSAGES))
    rows = 7 * PEER_BYTES  # the row of 8 ranks carries the all-to-alls of int4 gradients
    assert calls.buffer_bytes()["communicators"] == (3 + 1) * COMMUNICATOR_BYTES + rows
    assert COMMUNICATOR_BYTES + rows == pytest.approx(3.5e9)
    assert "communicators" not in messages.buffer_bytes()


@pytest.mark.parametrize(
    ("name", "options", "peers"),
    [
        ("paro-ggg", {}, 0),
        ("zero3", {"route": "two-hop"}, 7),
        ("zero3", {"route": "one-hop"}, 7),  # between nodes, too, but those of other nodes share buffers
        ("mics", {"gradients": "int8"}, 0),  # a column: one rank of each node
        ("qgz", {}, 7),
    ],
)
def test_all_to_alls_inside_a_node_take_memory_for_each_peer(name: str, options: dict[str, Any], peers: int) -> None:
    strategy = towpath.strategy(name, SHAPES[2], **options)
    plans = [plan_unit(strategy, unit, Precision(), Form.COLLECTIVES) for unit in UNITS]
    plain = (len(communicators(plans)) + 1) * COMMUNICATOR_BYTES
    assert communicator_bytes(plans)["communicators"] == plain + peers * PEER_BYTES
