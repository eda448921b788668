"""Examine a lab with `towpath doctor`: with one fault of a network or a machine, and without any.

    doctor [CASE …] [--rounds 4] [--quick]

A case with a fault is one examination. It is right if the first finding has the cause and the machines of the fault. A
clean case is one examination per round, which must find nothing.

A case of `accelerate test` runs that command on every rank while the lab has the same fault, for at most two minutes.
Without a fault, it shows on how many ranks the command works.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

from benchmarks.accelerate_peer import LIMIT_SECONDS, check_installed, outcome, tested
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.network_faults import CLEAN_SHAPES, FAULTS, INTER, examined, is_right
from lab import Lab
from lab.lab import PRELOAD
from towpath.topology.cluster import Topology

_MOST_SECONDS = 60.0
_PATIENCE_SECONDS = 180.0
_CLEAN_ROUNDS = 4
_MODULES = (*PRELOAD, "benchmarks.network_faults", "benchmarks.accelerate_peer", "towpath.cli.doctor")


def _examined(shape: Topology, fault: str | None, rounds: int) -> list[dict[str, Any]]:
    with Lab(shape, inter=FAULTS[fault].cables if fault else INTER, preload=_MODULES) as lab:
        return [lab.call(examined, fault, timeout_seconds=_PATIENCE_SECONDS)[0] for _ in range(rounds)]


def _short(found: dict[str, Any]) -> dict[str, Any]:
    """Return of an examination what a result line keeps."""
    keys = ("cause", "machines", "summary")
    return {
        "seconds": found["facts"]["seconds"],
        "findings": [{key: each[key] for key in keys} for each in found["findings"]],
    }


@dataclass(frozen=True, slots=True)
class FaultCase:
    """A fault that must be found, with its machines."""

    name: str

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Examine once."""
        fault = FAULTS[self.name]
        (found,) = _examined(fault.topology, self.name, 1)
        checks = [
            Check("right cause and machine", float(is_right(fault, found["findings"])), at_least=1),
            Check("other findings", float(len(found["findings"]) - 1)),
            Check("seconds", found["facts"]["seconds"], at_most=_MOST_SECONDS),
        ]
        return {"checks": checks, "examined": [_short(found)]}


@dataclass(frozen=True, slots=True)
class CleanCase:
    """A lab without a fault, of which nothing must be said."""

    nodes: int
    ranks: int

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"clean {self.nodes}x{self.ranks}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Examine once per round."""
        found = _examined(Topology(self.nodes, self.ranks), None, settings.rounds)
        checks = [
            Check("runs with a finding", float(sum(bool(each["findings"]) for each in found)), at_most=0),
            Check("seconds, the longest", max(each["facts"]["seconds"] for each in found), at_most=_MOST_SECONDS),
        ]
        return {"checks": checks, "examined": [_short(each) for each in found]}


@dataclass(frozen=True, slots=True)
class AccelerateCase:
    """`accelerate test` in a lab with a fault, or in one of some nodes without a fault."""

    fault: str | None
    nodes: int = 2

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"accelerate test, {self.fault or f'clean {self.nodes}x1'}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Test once."""
        installed, fault = check_installed(), FAULTS[self.fault] if self.fault else None
        shape, cables = (fault.topology, fault.cables) if fault else (Topology(self.nodes, 1), INTER)
        with Lab(shape, inter=cables, preload=_MODULES) as lab, tempfile.TemporaryDirectory() as folder:
            ended = lab.call(tested, self.fault, folder, timeout_seconds=LIMIT_SECONDS + _PATIENCE_SECONDS)
        found = outcome(fault, ended)
        passed = sum(status == 0 for status in found["statuses"])
        checks = [
            Check("ranks on which it ended", float(sum(status is not None for status in found["statuses"]))),
            Check("ranks on which it passed", float(passed)),
            Check("names the cause", float(found["names_cause"])),
            Check("names the machine", float(found["names_machine"])),
            Check("seconds", found["seconds"]),
        ]
        return {"checks": checks, "accelerate": {"version": installed, **found}}


SUITES = [
    Suite(
        "doctor",
        __doc__,
        [
            *map(FaultCase, FAULTS),
            *(CleanCase(shape.nodes, shape.ranks_per_node) for shape in CLEAN_SHAPES),
            *(AccelerateCase(None, ranks) for ranks in sorted({fault.topology.world for fault in FAULTS.values()})),
            *map(AccelerateCase, FAULTS),
        ],
        rounds=_CLEAN_ROUNDS,
    )
]
