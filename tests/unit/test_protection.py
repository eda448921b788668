"""Protection from lost nodes: its settings, which node holds which state, and what snapshots cost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

import towpath
from towpath.core.placement import legal_placements
from towpath.core.presets import parse_strategy
from towpath.core.protection import RESTART_SECONDS, VERIFIED_RATE, Survives
from towpath.core.schedule import schedule
from towpath.core.strategy import Strategy
from towpath.core.units import units_from_numels
from towpath.errors import ConfigError
from towpath.outer.settings import Outer
from towpath.topology.cluster import Topology
from towpath.train.config import Config

# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -1, 1.5, "10", True, None])
def test_snapshots_are_taken_every_whole_number_of_steps(every: Any) -> None:
    with pytest.raises(ConfigError, match="every is a whole number of at least 1"):
        towpath.Protect(every)


def test_protection_is_part_of_a_strategy_and_survives_toml() -> None:
    made = towpath.strategy("paro-iig", Topology(3, 2), protect=towpath.Protect(every=5))
    assert made.protect == towpath.Protect(5)
    assert Strategy.from_toml(made.to_toml()) == made
    assert "[protect]\nevery = 5\n" in made.to_toml()
    assert "every 4 steps" in str(made)
    assert parse_strategy("paro-iig protect=5", Topology(3, 2)) == made
    assert replace(made, protect=None) == towpath.strategy("paro-iig", Topology(3, 2))
    with pytest.raises(ConfigError, match="not a strategy"):
        Strategy.from_toml(made.to_toml() + "never = 1\n")
    for value in ("0", "soon"):
        with pytest.raises(ConfigError, match=f"Protect: every .*{value}"):
            parse_strategy(f"mics protect={value}", Topology(2, 2))


def test_a_single_node_cannot_be_protected() -> None:
    topology = Topology(1, 4)
    with pytest.warns(UserWarning, match=r"1 node of 4 ranks has no other node.*newest checkpoint"):
        made = towpath.strategy("zero3", topology, protect=towpath.Protect())
    assert made == towpath.strategy("zero3", topology)
    with pytest.raises(ConfigError, match="expected several nodes"):
        replace(made, protect=towpath.Protect())
    with pytest.raises(ConfigError, match=r"protect is a towpath.Protect, or None; got 10"):
        towpath.strategy("zero3", Topology(2, 2), protect=10)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_islands_of_one_node_are_protected_by_other_islands() -> None:
    made = towpath.strategy("mics", Topology(2, 2), outer=Outer(every=4), protect=towpath.Protect())
    assert made.topology.nodes == 1 and made.protect == towpath.Protect()


def test_a_file_for_training_sets_the_steps_between_snapshots() -> None:
    config = Config.from_dict({"strategy": {"name": "mics", "protect": 5}})
    assert config.strategy.build(Topology(2, 2)).protect == towpath.Protect(5)
    assert Config.from_dict({"strategy": {"name": "mics"}}).strategy.build(Topology(2, 2)).protect is None
    with pytest.raises(ConfigError, match=r"strategy.protect = -1: expected 0 or more"):
        Config.from_dict({"strategy": {"protect": -1}})
    for which in ("pipeline", "tensor"):
        with pytest.raises(ConfigError, match=f"strategy.protect = 5: expected 0 with parallel.{which} = 2; Saver"):
            Config.from_dict({"strategy": {"protect": 5}, "parallel": {which: 2}})


# --- which node holds what --------------------------------------------------------------------------------------------

UNITS = units_from_numels({"root": 1000, "a": 96_000, "b": 48_000})
SHAPES = (Topology(2, 1), Topology(2, 4), Topology(3, 2), Topology(4, 2), Topology(4, 4))


@pytest.mark.parametrize("name", towpath.strategies())
@pytest.mark.parametrize("topology", SHAPES, ids=str)
def test_the_bytes_of_a_node_are_those_of_its_ranks_slices(name: str, topology: Topology) -> None:
    for placement in legal_placements(topology) if name == "zero3" else [towpath.strategy(name, topology).placement]:
        made = schedule(Strategy(topology, placement), UNITS, 1)
        found = made.protection
        slots = made.strategy.moves.optimizer.slots
        nodes_of: dict[int, set[int]] = defaultdict(set)
        for rank, slot in enumerate(slots):
            nodes_of[slot].add(topology.node_of(rank))
        total = 12 * 145_000  # of a parameter, the master and two states
        for node in range(topology.nodes):
            held = [slot for slot, nodes in nodes_of.items() if node in nodes]
            alone = [slot for slot in held if nodes_of[slot] == {node}]
            assert found.state_bytes == pytest.approx(total * len(held) / len(nodes_of), abs=1)
            assert found.buddy_bytes == pytest.approx(total * len(alone) / len(nodes_of), abs=1)
        survived = all(len(nodes) > 1 for nodes in nodes_of.values())
        assert found.survives == (Survives.YES if survived else Survives.WITH_BUDDIES)
        assert (found.expected_bytes == 0) == survived


def test_presets_that_keep_all_state_in_each_node_send_nothing() -> None:
    free = {
        name
        for name in towpath.strategies()
        if schedule(towpath.strategy(name, Topology(4, 2)), UNITS, 1).protection.buddy_bytes == 0
    }
    assert free == {"ddp", "mics", "paro-iii", "paro-nii", "paro-nni", "paro-nnn"}


def test_one_node_survives_nothing_and_islands_go_on() -> None:
    alone = schedule(towpath.strategy("zero3", Topology(1, 4)), UNITS, 1).protection
    assert (alone.survives, alone.buddy_bytes, alone.expected_bytes) == (Survives.NO, 0, 0)
    outer = towpath.strategy("mics", Topology(2, 2), outer=Outer(every=4))
    islands = schedule(outer, UNITS, 1).protection
    assert islands.survives is Survives.YES
    # An island's own weights and states are nowhere else. The slow weights and the momentum are on all islands.
    assert islands.buddy_bytes == 12 * 145_000
    assert islands.state_bytes == pytest.approx(20 * 145_000, rel=0.01)


def test_frozen_parameters_are_sent_only_once() -> None:
    frozen = tuple(replace(u, buckets=tuple(replace(b, trainable=False) for b in u.buckets)) for u in UNITS[1:])
    for extent, alone in ((Topology(2, 2).whole, 4 * 144_000 / 2), (towpath.Extent(2), 0)):
        made = towpath.strategy("zero3", Topology(2, 2), frozen=extent)
        found = schedule(made, (UNITS[0], *frozen), 1).protection
        assert found.buddy_bytes == 12 * 1000 / 2 + alone
        assert 0 < found.expected_bytes < 12 * 1000 / 2


def test_rounding_errors_of_a_codec_are_each_ranks_own() -> None:
    made = towpath.strategy("mics", Topology(2, 2), gradients="int4", feedback="first")
    found = schedule(made, UNITS, 1)
    assert found.protection.survives is Survives.YES
    assert found.protection.buddy_bytes == 2 * found.memory_bytes()["feedback"] > 0


def test_memory_and_seconds_of_a_node() -> None:
    made = towpath.strategy("zero3", Topology(2, 2), protect=towpath.Protect(5))
    found = schedule(made, UNITS, 1).protection
    state = 6 * 145_000
    assert (found.state_bytes, found.buddy_bytes, found.protect.every) == (state, state, 5)
    assert found.host_bytes == 5 * state
    assert found.heal_seconds(1e6) == pytest.approx(RESTART_SECONDS + state / 1e6 + state / 2 / VERIFIED_RATE)
    assert 0.5 * state < 4 * found.step_bytes < state


def test_the_schedule_lists_what_buddies_get() -> None:
    made = towpath.strategy("zero3", Topology(2, 2), protect=towpath.Protect(5))
    found = schedule(made, UNITS, 1)
    assert str(found).endswith(str(found.protection))
    assert f"{12 * 145_000:,}" in str(found.protection)
    assert "buddy" not in str(schedule(replace(made, protect=None), UNITS, 1))
    assert found.transfers == schedule(replace(made, protect=None), UNITS, 1).transfers
