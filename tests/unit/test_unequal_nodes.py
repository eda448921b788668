"""Nodes with unequal numbers of ranks: their topology, what is refused on them, and what the rest sends."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import towpath
from tests.cases import each
from tests.unit.test_route_bytes import one_by_one
from towpath import Extent, Outer, Placement, Protect, Topology, Transport
from towpath.cli.main import app
from towpath.core.placement import legal_extents
from towpath.core.routes import COLLECTIVES, Form, Grid
from towpath.core.schedule import schedule
from towpath.core.strategy import Strategy
from towpath.core.units import units_from_numels
from towpath.errors import ConfigError
from towpath.plan.catalog import load_cluster
from towpath.topology.cluster import FLAT
from towpath.train.config import StrategyConfig

SHAPE = Topology(2, (1, 3))
WORDS = (
    r"needs the same number of ranks on each node; got 1 rank on node 0 and 3 ranks on node 1\. Start the same number"
)


def test_ranks_are_on_the_nodes_that_their_numbers_say() -> None:
    topology = Topology(3, (2, 1, 3))
    assert topology.world == 6 and topology.sizes == (2, 1, 3)
    assert [*map(topology.node_of, range(6))] == [0, 0, 1, 2, 2, 2]
    assert [*map(topology.local_of, range(6))] == [0, 1, 0, 0, 1, 2]
    assert topology.of([1, 2, 4, 5]) == Topology(3, (1, 1, 2))
    assert topology.of([0, 2, 3]) == Topology(3, 1)
    assert (str(topology), topology.words) == ("2 + 1 + 3", "3 nodes of 2 + 1 + 3 ranks")


def test_equal_numbers_are_an_equal_topology() -> None:
    assert Topology(2, (3, 3)) == Topology(2, 3) and Topology(2, 3).sizes == (3, 3)
    assert Topology.parse("2+2") == Topology.parse("2x2") == Topology(2, 2)
    assert Topology.parse("1+3") == SHAPE


@pytest.mark.parametrize(("nodes", "ranks"), [(3, (1, 3)), (2, (1, 0)), (2, (1, 2.0)), (2, ()), (2, 0)])
def test_numbers_that_do_not_fit_are_refused(nodes: int, ranks: Any) -> None:
    with pytest.raises(ConfigError, match="ranks_per_node"):
        Topology(nodes, ranks)


def test_a_group_of_unequal_rows_has_no_columns() -> None:
    assert Grid.of([0, 1, 1, 1]) == Grid(4, 1) == Grid.of([0, 0, 1, 2])
    assert legal_extents(SHAPE) == [Extent(1), SHAPE.whole]


@pytest.mark.parametrize("name", FLAT)
def test_flat_strategies_place_as_on_one_node_of_all_ranks(name: str) -> None:
    made = towpath.strategy(name, SHAPE)
    assert Strategy.from_toml(made.to_toml()) == made
    assert made.moves == towpath.strategy(name, Topology(1, 4)).moves


@pytest.mark.parametrize("name", [name for name in towpath.strategies() if name not in FLAT])
def test_every_other_preset_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"strategy .{re.escape(name)}. {WORDS}.*Unequal nodes take ddp, zero1, zero2 or zero3"
    ):
        towpath.strategy(name, SHAPE)


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"route": "hierarchical"}, "zero3: gather by the route 'hierarchical'"),
    ({"gradients": "int4"}, "zero3: reduce by the route 'two-hop'"),
    ({"weights": "int8"}, "zero3: gather by the route 'ho-ring'"),
    ({"name": "zero1", "gradients": "low-rank:2"}, "zero1: grad_sync by the route 'ho-ring'"),
    ({"protect": Protect(every=3)}, "zero3: protect"),
    ({"outer": Outer(every=8)}, "outer"),
    ({"outer": Outer(every=8, meet="host:1")}, "outer"),
    ({"frozen": Extent(3)}, "frozen 3×1"),
]


@pytest.mark.parametrize(("options", "what"), NAMED, ids=str)
def test_options_that_need_columns_are_refused_with_the_remedy(options: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what} {WORDS}"):
        towpath.strategy(**{"name": "zero3", "topology": SHAPE} | options)


def test_placements_of_ones_own_are_one_rank_or_all() -> None:
    made = towpath.strategy(Placement(Extent(1), SHAPE.whole, SHAPE.whole), SHAPE)
    assert made.moves == towpath.strategy("zero2", SHAPE).moves
    with pytest.raises(ConfigError, match=f"P 2×1 {WORDS}"):
        towpath.strategy(Placement(Extent(2), Extent(2), Extent(2)), SHAPE)
    with pytest.raises(ConfigError, match=f"custom: reduce by the route 'two-hop' {WORDS}"):
        replace(made, name="custom", reduce=Transport("two-hop"))


@each(label=(*(f"{name} " for name in FLAT), "zero3 ring", "zero1 one-hop"), form=Form)
def test_each_node_sends_what_its_ranks_messages_add_up_to(label: str, form: Form) -> None:
    name, route = label.split(" ")
    options: Any = {"route": route or None, "gradients": "int8:32" if route == "one-hop" else "none"}
    for sizes in ((1, 3), (3, 1), (2, 1, 3)):
        topology = Topology(len(sizes), sizes)
        made = towpath.strategy(name, topology, **options)
        found = schedule(made, units_from_numels([640, 101]), 2, form=form)
        for transfer in (t for t in found.transfers if t.move.op in COLLECTIVES):
            inside, leaving = one_by_one(transfer)
            sent = [*map(transfer.cable_bytes, range(topology.nodes))]
            assert (transfer.intra_bytes, sent) == (inside, leaving), transfer
    # In a ring, one rank of each node sends out of it, however many it has.
    ring = schedule(towpath.strategy("zero3", SHAPE), units_from_numels([64]), 1).transfers[0]
    assert ring.cable_bytes(0) == ring.cable_bytes(1) == ring.region_bytes * 3 // 4


def test_towpath_train_refuses_before_ranks_meet() -> None:
    assert StrategyConfig(name="zero2", nodes="1+3").build(Topology(4, 1)).topology == SHAPE
    for name, what in (("mics", "strategy 'mics'"), ("auto", "strategy.name = auto")):
        with pytest.raises(ConfigError, match=f"{what} {WORDS}"):
            StrategyConfig(name=name, nodes="1+3")
    for nodes in ("1+", "+3", "1+0", "1x2+3"):
        with pytest.raises(ConfigError, match=r"such as 1\+3"):
            StrategyConfig(nodes=nodes)


def test_towpath_plan_refuses(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["plan", "gpt2", "ethernet-10g", "--batch", "8", "--nodes", "1+3"])
    assert isinstance(found.exception, ConfigError) or found.exit_code == 2
    assert "towpath plan needs the same number" in " ".join((found.output + str(found.exception)).split())
    file = tmp_path / "two.toml"
    file.write_text("nodes = 2\nranks_per_node = [1, 3]\n")
    with pytest.raises(ConfigError, match=f"the planner {WORDS}"):
        load_cluster(file)


def test_the_planner_and_protection_know_equal_nodes_only() -> None:
    made = schedule(towpath.strategy("zero3", SHAPE), units_from_numels([64]), 1)
    with pytest.raises(ConfigError, match=f"protect {WORDS}"):
        _ = made.protection
    cluster = load_cluster("ethernet-10g")
    with pytest.raises(ConfigError, match=f"the planner {WORDS}"):
        replace(cluster.hardware, topology=SHAPE)
