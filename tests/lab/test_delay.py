"""Cables with latency, loss and other rates up than down: each is as asked, and its process ends with the lab."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import FLAT, Cable, Lab, Rate
from lab.errors import LabError
from tests.lab.test_leftovers import processes_with
from towpath.topology.cluster import Topology

SHAPE = Topology(2, 1)
FAST = Cable.parse("200mbit")
DATAGRAMS = str(Path(__file__).with_name("datagrams.py"))


@pytest.fixture
def ready(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "ready")
    return str(tmp_path / "ready")


def told(lab: Lab, ready: str, *arguments: object) -> dict[str, Any]:
    result = lab.run([DATAGRAMS, ready, *map(str, arguments)], launcher="direct", capture=True, timeout_seconds=120)
    assert result.returncode == 0 and result.output is not None, result.output
    return json.loads(result.output)


def test_a_round_trip_takes_the_mean_of_both_latencies(ready: str) -> None:
    slow, slower = replace(FLAT, latency_seconds=10e-3), replace(FLAT, latency_seconds=30e-3)
    with Lab(SHAPE, inter=(slow, slower)) as lab:
        assert [lab.wiring.mtu_bytes(node) for node in range(2)] == [1500, 1500]
        seen = told(lab, ready, "round-trips", 200, 21e-3)
    # Never shorter, whatever the machine does. On a busy machine, many may be longer.
    assert min(seen["answer"]) >= 20e-3
    assert seen["answer"][-1] <= 21e-3
    assert seen["mtu"] == 1500
    assert seen["recovery"] == 1  # TCP resends at once what is lost


@pytest.mark.parametrize(("receiver", "rate"), [(1, "40mbit"), (0, "60mbit")], ids=["up", "down"])
def test_a_delayed_cable_holds_its_rate_in_each_direction(ready: str, receiver: int, rate: str) -> None:
    with Lab(SHAPE, inter=(Cable.parse("60mbit", up="40mbit", latency="4ms"), FAST)) as lab:
        window, everything = told(lab, ready, "rate", receiver, Rate.parse(rate).bytes_per_second)["answer"]
    assert 0.95 <= window <= 1.05
    assert everything <= 1


def lost(ready: str, seed: int) -> list[int]:
    with Lab(SHAPE, inter=(Cable(down=FAST.down, up=FAST.up, loss=0.05, seed=seed), FAST)) as lab:
        return told(lab, ready, "lost", 1000)["answer"]


def test_the_given_share_of_packets_is_lost_and_the_same_ones_with_the_same_seed(ready: str) -> None:
    first, again, other = lost(ready, 1), lost(ready, 1), lost(ready, 2)
    assert first == again != other
    dice = random.Random(1)
    assert first == [number for number in range(1000) if dice.random() < 0.05]
    for each in (first, other):
        assert abs(len(each) - 50) <= 3 * math.sqrt(1000 * 0.05 * 0.95)


def test_a_cable_survives_a_cut_and_its_process_ends_with_its_node(ready: str) -> None:
    with Lab(SHAPE, inter=FLAT) as lab:
        name = lab.disk.parent.name
        assert len(processes_with(name)) == 4, "the guard, the keeper and two cables"
        lab.cut(1)
        send = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'.', ('node0', 6000))"
        lab.run(["-c", send], launcher="direct", capture=True)
        lab.mend(1)
        assert told(lab, ready, "round-trips", 1, 0)["answer"]
        lab.destroy(1)
        assert len(processes_with(name)) == 3
        lab.rebuild(1)
        assert len(processes_with(name)) == 4
        assert told(lab, ready, "round-trips", 1, 0)["answer"]
    assert not processes_with(name)


def test_rates_change_while_the_lab_stands_and_nothing_else(ready: str) -> None:
    with Lab(SHAPE, inter=FLAT) as lab:
        lab.shape(inter=Cable.parse("60mbit", up="30mbit"))
        assert lab.wiring.cables == (replace(FLAT, down=Rate.parse("60mbit"), up=Rate.parse("30mbit")),) * 2
        share, _ = told(lab, ready, "rate", 1, Rate.parse("30mbit").bytes_per_second)["answer"]
        assert 0.95 <= share <= 1.05
        with pytest.raises(LabError, match=r"cannot change: from .* 20 ms to .* 5 ms"):
            lab.shape(inter=Cable.parse("60mbit", latency="5ms"))
        with pytest.raises(LabError, match="a cable with latency or loss carries at most"):
            lab.shape(inter="10gbit")


def test_a_cable_is_described_by_texts() -> None:
    assert Cable.parse("flat") == FLAT
    assert str(FLAT) == "100mbit down, 40mbit up, 20 ms"
    cable = Cable.parse("flat", up="50mbit", latency="0.1s", loss="0.5%")
    assert (cable.up, cable.latency_seconds, cable.loss) == (Rate.parse("50mbit"), 0.1, 0.005)
    assert str(cable) == "100mbit down, 50mbit up, 100 ms, 0.5% lost"
    assert str(Cable.parse("200mbit")) == "200mbit"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"down": "100mbit", "latency": "20"}, "not a time: '20'"),
        ({"down": "100mbit", "loss": "0.01"}, "not a loss: '0.01'.*such as 1%"),
        ({"down": "100mbit", "loss": "100%"}, "a loss from 0 to below 1"),
        ({"down": "1gbit", "latency": "1ms"}, "at most 500mbit each way.*; got 1gbit down"),
    ],
    ids=["time", "loss", "all", "fast"],
)
def test_other_descriptions_are_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(LabError, match=told):
        Cable.parse(**given)


@pytest.mark.parametrize("given", [{"latency_seconds": math.nan}, {"latency_seconds": math.inf}, {"mtu_bytes": 0}])
def test_numbers_that_no_cable_has_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(LabError, match=r"latency of at least 0 s|mtu_bytes=0: expected 576"):
        replace(FAST, **given)


def test_each_node_has_a_cable() -> None:
    mixed: Any = (FAST, None, "flat")
    with pytest.raises(LabError, match="expected the cable of each of 3 nodes, got None among them"):
        Lab(SHAPE, inter=mixed, head=True)
    with pytest.raises(LabError, match="expected the cable of each of 3 nodes, got 2"):
        Lab(SHAPE, inter=(FAST, FAST), head=True)
