"""`towpath doctor` on nodes of a lab: it names what was broken there, and nothing where nothing was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network_faults import CLEAN_SHAPES, FAULTS, INTER, examined, is_right
from lab import Cable, Lab
from lab.lab import PRELOAD
from lab.links import address
from tests.ranks.strategies import seldom
from towpath.topology.cluster import Topology

PATIENCE_SECONDS = 120
# A rank would otherwise import them while it is measured.
MODULES = (*PRELOAD, "benchmarks.network_faults", "towpath.cli.doctor")


def _told(found: Any) -> str:
    ranks = [(machine["name"], machine["ranks"], machine["load"]) for machine in found["facts"]["machines"]]
    return "\n".join(map(str, (*found["findings"], *found["facts"]["ways"], *ranks)))


@pytest.fixture(scope="module")
def labs(lab: Callable[..., Lab]) -> Callable[..., Lab]:
    def of(topology: Topology, cables: str | tuple[Cable, ...] = INTER) -> Lab:
        return lab(topology.nodes, topology.ranks_per_node, inter=cables, preload=MODULES)

    return of


@pytest.mark.parametrize(
    "name", [name if name == "bad hosts entry" else seldom(name, id=name) for name in FAULTS], ids=str
)
def test_a_fault_is_found_on_its_machine(name: str, labs: Callable[..., Lab]) -> None:
    fault = FAULTS[name]
    quick = name == "bad hosts entry"
    found = labs(fault.topology, fault.cables).call(examined, name, quick, timeout_seconds=PATIENCE_SECONDS)[0]
    assert is_right(fault, found["findings"]), _told(found)


@pytest.mark.parametrize(
    "shape", [shape if shape == Topology(2, 1) else seldom(shape) for shape in CLEAN_SHAPES], ids=str
)
def test_nothing_is_found_where_nothing_is_wrong(shape: Topology, labs: Callable[..., Lab]) -> None:
    found = labs(shape).call(examined, None, shape == Topology(2, 1), timeout_seconds=PATIENCE_SECONDS)[0]
    assert found["findings"] == [], _told(found)


@pytest.mark.parity
def test_it_needs_no_launcher(tmp_path: Path) -> None:
    hosts, file = f"{address(0)},{address(1)}", tmp_path / "found.json"
    with Lab(Topology(2, 1), inter=INTER) as lab:
        done = lab.run(
            ["-m", "towpath", "doctor", "--hosts", hosts, "--json", str(file)],
            launcher="direct",
            capture=True,
            timeout_seconds=PATIENCE_SECONDS,
        )
    assert done.returncode == 0, done.output
    assert done.output is not None and done.output.count("Nothing is wrong: 2 machines") == 2  # on each of them
    assert json.loads(file.read_text())["findings"] == []


@pytest.mark.parity
def test_a_cut_cable_is_a_finding_and_no_hang() -> None:
    hosts = f"{address(0)},{address(1)}"
    with Lab(Topology(2, 1), inter=INTER) as lab:
        lab.cut(1)
        arguments = ["-m", "towpath", "doctor", "--hosts", hosts, "--wait", "8"]
        done = lab.run(arguments, launcher="direct", capture=True, timeout_seconds=PATIENCE_SECONDS)
    assert done.returncode == 1
    assert done.output is not None and "UNREACHABLE: node1 does not reach" in done.output, done.output


@pytest.mark.parity
def test_it_runs_under_torchrun() -> None:
    with Lab(Topology(2, 2), inter=INTER) as lab:
        done = lab.run(["-m", "towpath", "doctor"], capture=True, timeout_seconds=PATIENCE_SECONDS)
    assert done.returncode == 0, done.output
    assert done.output is not None and done.output.count("Nothing is wrong: 2 machines") == 1
