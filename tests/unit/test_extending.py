"""docs/guides/extending.md: the preset and the route of the page do what it says once they are put where it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import towpath
from tests.documented import programs
from towpath.core import presets, routes
from towpath.core.routes import Group, Op, sends
from towpath.core.schedule import schedule
from towpath.core.units import units_from_numels
from towpath.topology.cluster import Extent, Topology

SHAPE = Topology(2, 4)


def _defined(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(programs("guides/extending.md")[name], "extending.md", "exec"), found)
    return found


def test_the_preset_of_the_page_is_a_strategy_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets._PLACERS, "pairs", _defined("preset")["_pairs"])
    assert "pairs" in towpath.strategies()
    made = towpath.strategy("pairs", SHAPE)
    assert made.placement.params == Extent(2)
    assert towpath.strategy("pairs", SHAPE, group=Extent(4)).placement == towpath.strategy("mics", SHAPE).placement
    assert schedule(made, units_from_numels([1 << 20]), 2).inter_bytes > 0


@pytest.mark.parametrize("shape", [SHAPE, Topology(3, 2), Topology(2, 1)], ids=str)
def test_the_route_of_the_page_brings_every_slice_to_everyone_once(
    monkeypatch: pytest.MonkeyPatch, shape: Topology
) -> None:
    monkeypatch.setitem(routes._GATHERS, "counter-ring", _defined("route")["_counter_ring"])
    monkeypatch.setattr(routes, "ROUTES", (*routes.ROUTES, "counter-ring"))
    members = range(shape.world)
    group = Group(tuple(members), tuple(members))
    nodes = [shape.node_of(rank) for rank in members]
    found = list(sends(Op.ALL_GATHER, "counter-ring", group, nodes, 1))

    brought = Counter((send.target, send.slot) for send in found)
    assert set(brought) == {(member, slot) for member in members for slot in members if slot != member}
    assert set(brought.values()) == {1}
    has = {(member, member): 0 for member in members}
    for send in found:
        assert has[send.source, send.slot] <= send.step, "sent before it was there"
        has[send.target, send.slot] = send.until
