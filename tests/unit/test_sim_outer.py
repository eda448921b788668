"""The simulator replays a period of outer steps: their mean, what overlaps, and what is waited for."""

from __future__ import annotations

from functools import cache

import pytest

import towpath
import towpath.core.schedule
from towpath import Outer
from towpath.core.strategy import TransferKind
from towpath.plan.catalog import load_cluster
from towpath.plan.model import Transformer
from towpath.plan.request import Batching, Prediction, Request
from towpath.plan.solver import Solver

BATCHING = Batching(4, 1)


@cache
def solver() -> Solver:
    cluster = load_cluster("two-desktops")
    model = Transformer(50_000, 768, 12, 12, 3072).model("gpt", 1024)
    return Solver(model, cluster, Request(16, cluster.memory))


@cache
def predicted(outer: Outer | None, name: str = "mics") -> Prediction:
    return solver().predict(towpath.strategy(name, solver().cluster.topology, outer=outer), BATCHING)


def test_a_period_costs_one_exchange_more_than_its_steps() -> None:
    """What a period takes beyond steps without exchanges is the same for any number of them."""
    added = [outer.every * predicted(outer).exposed[TransferKind.OUTER] for outer in (Outer(8), Outer(16))]
    assert added[0] == pytest.approx(added[1], rel=0.05)
    assert added[0] > 0


@pytest.mark.parametrize("name", ["ddp", "zero3", "paro-iig"])
def test_the_bytes_are_those_of_the_schedule(name: str) -> None:
    found = predicted(Outer(8, fragments=2), name)
    made = found.strategy
    units = tuple(unit.spec for unit in solver().model.units)
    plan = towpath.core.schedule.schedule(made, units, 1, solver().request.precision).outer
    assert plan is not None
    inside = solver().of_island(made).predict(towpath.strategy(name, made.topology), BATCHING)
    assert found.inter_bytes - made.islands * inside.inter_bytes == pytest.approx(plan.mean_inter_bytes, abs=1)
    assert found.memory["slow weights"] == plan.memory_bytes()[0]["slow weights"]
    assert found.seconds >= inside.seconds
