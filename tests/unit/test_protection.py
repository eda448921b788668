"""Protection from lost nodes: its settings, which node holds which state, and what snapshots cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import towpath
from towpath.core.presets import parse_strategy
from towpath.core.strategy import Strategy
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
    assert "every 5 steps" in str(made)
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
    with pytest.raises(ConfigError, match=r"strategy.protect = 5: expected 0 with parallel.pipeline = 2"):
        Config.from_dict({"strategy": {"protect": 5}, "parallel": {"pipeline": 2}})
