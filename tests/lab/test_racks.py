"""Two racks in the lab, joined by one slow cable: what it carries, and what the numbers of ranks are worth."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from lab import Lab
from lab.errors import LabError
from lab.lab import PRELOAD
from tests.lab.warm import warm_lab
from tests.ranks.strategies import seldom
from towpath.topology.cluster import Topology

# Nodes of two racks in turn, as a scheduler may hand them out.
RACKS = (0, 1, 0, 1)
# Each rank of each call would otherwise import them.
MODULES = (*PRELOAD, "towpath.api", "tests.lab.test_racks")
SHORT, LONG = 1, 4


def train(rank: int, world: int, name: str, steps: int, named: bool) -> tuple[str, list[int]]:
    """Train some steps. Return the topology, and what the schedule says that leaves each rack in a step."""
    dist.barrier()  # all ranks have connected
    dist.destroy_process_group()
    if not named:
        del os.environ["TOWPATH_RACK"]
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 100)
    towpath.init()
    topology = towpath.Topology.detect()
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    group: dict[str, Any] = {"group": towpath.Extent(1, 2)} if name == "mics" else {}
    strategy = towpath.strategy(name, topology, **group)
    towpath.shard(model, strategy, units=[nn.Linear])
    for _ in range(steps):
        model(torch.ones(2, 512)).sum().backward()
        model.zero_grad()
    made = towpath.schedule(strategy, model)
    return str(topology), [made.rack_bytes(rack) for rack in range(topology.racks)]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with warm_lab(Topology(4, 1), inter="1gbit", spine="200mbit", racks=RACKS, preload=MODULES) as lab:
        yield lab


def _carried(lab: Lab, name: str, steps: int, named: bool) -> tuple[str, list[int], list[int]]:
    """Return what `train` does, and what each rack's cable carried."""
    before = lab.rack_counters()
    (topology, planned), *_ = lab.call(train, name, steps, named)
    return topology, planned, [(a - b).sent_bytes for a, b in zip(lab.rack_counters(), before, strict=True)]


@pytest.mark.parametrize(("name", "at_most"), [("zero3", 0.6), seldom("mics", 0.45)])
def test_ranks_numbered_by_rack_send_what_is_planned_and_far_less(lab: Lab, name: str, at_most: float) -> None:
    topology, planned, long = _carried(lab, name, LONG, named=True)
    assert topology == "4 × 1 in racks of 2"
    *_, short = _carried(lab, name, SHORT, named=True)
    assert [(b - a) / (LONG - SHORT) for a, b in zip(short, long, strict=True)] == pytest.approx(planned, rel=0.03)
    unordered, _, before = _carried(lab, name, LONG, named=False)
    assert unordered == "4 × 1" and sum(long) <= at_most * sum(before)


def test_a_lab_needs_the_rack_of_each_node() -> None:
    with pytest.raises(LabError, match="expected the rack of each of 4 nodes"):
        Lab(Topology(4, 1), racks=(0, 1))
