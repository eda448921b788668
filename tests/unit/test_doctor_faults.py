"""The faults that `towpath doctor` is measured with, and how the outcome of `accelerate test` is judged and shown."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accelerate_peer import Ended, outcome
from benchmarks.network_faults import FAULTS, is_right
from benchmarks.suites.doctor import AccelerateCase, FaultCase
from tools.docs.draw_doctor import section_of

PASSED = "stdout: All rng are properly synched.\nTest is a success! You are ready for your distributed training!\n"
FAILED = (
    "Running:  accelerate-launch --config_file=/tmp/node2/config.json script.py\n"
    "stderr: RuntimeError: [pair.cc:547] Connection refused, remote=[10.77.0.2]:38291\n"
    "stderr: subprocess.CalledProcessError: Command '[...]' failed: node1\n"
)


def test_there_are_twelve_faults_on_nodes_of_their_lab() -> None:
    assert len(FAULTS) == 12
    for fault in FAULTS.values():
        assert fault.machines <= {f"node{node}" for node in range(fault.topology.nodes)}
        assert isinstance(fault.cables, str) or len(fault.cables) == fault.topology.nodes


def test_a_finding_with_another_machine_is_not_right() -> None:
    finding = {"cause": "half duplex", "machines": ["node1"]}
    assert is_right(FAULTS["half duplex"], [finding])
    assert not is_right(FAULTS["half duplex"], [finding | {"machines": ["node2"]}])
    assert not is_right(FAULTS["half duplex"], [])


@pytest.mark.parametrize(
    ("fault", "output", "cause", "machine"),
    [
        ("firewall one way", PASSED, False, False),
        ("firewall one way", FAILED, True, True),
        ("halved cable", FAILED, False, False),  # it is on node2, which only the repeated command has
        ("MTU hole", FAILED, False, True),
        ("half duplex", "stderr: Error: 10.77.0.20 and node12 are slow\n", False, False),
        ("bad hosts entry", "stderr: Error: connect to 127.0.1.1\n", True, False),
        ("slow rank", "the output is slow on node1\n", False, False),  # no complaint
    ],
)
def test_a_fault_is_named_in_complaints_only(fault: str, output: str, cause: bool, machine: bool) -> None:
    found = outcome(FAULTS[fault], [Ended(0, 3.0, PASSED), Ended(1, 4.0, output)])
    assert (found["names_cause"], found["names_machine"]) == (cause, machine)
    assert found["seconds"] == 4.0 and found["last_lines"][0].startswith("Test is a success!")


def _runs() -> dict[str, Any]:
    def examined(name: str, right: bool, findings: list[dict[str, Any]]) -> dict[str, Any]:
        checks = [{"what": "right cause and machine", "found": float(right)}]
        return {"case": {"name": name}, "checks": checks, "examined": [{"seconds": 21.4, "findings": findings}]}

    def tested(name: str, *statuses: int | None, **named: bool) -> dict[str, Any]:
        told = {"names_cause": False, "names_machine": False, **named}
        kept = {"version": "1.15.0", "statuses": [*statuses], "seconds": 31.2, **told}
        return {"case": {"name": AccelerateCase(name).name}, "checks": [], "accelerate": kept}

    runs: list[dict[str, Any]] = [
        examined(FaultCase("half duplex").name, True, [{"cause": "half duplex", "machines": ["node1"]}]),
        examined("slow rank", False, [{"cause": "loss", "machines": ["node0", "node1"]}]),
        examined("MTU hole", False, []),
        examined("loss of 1 %", False, []),
        tested("half duplex", 0, 0, 0),
        tested("slow rank", None, 1, names_machine=True),
        tested("MTU hole", None, None),
        tested("loss of 1 %", 1, 1, 1, names_machine=True),
        {"case": {"name": AccelerateCase(None, 3).name}, "checks": [], "accelerate": {"statuses": [0, 0, 1]}},
        {"case": {"name": "clean 2x1"}, "checks": [], "examined": [{"findings": []}, {"findings": [{}]}]},
    ]
    return {run["case"]["name"]: run for run in runs}


def test_the_section_has_a_row_for_each_fault() -> None:
    text = section_of(_runs())
    assert "| half duplex | yes | 21 | after 31 s: success | nothing |\n" in text
    assert "| slow rank | no: loss of node0, node1 | 21 | on 1 of 2 ranks: exit code 1 | machine |\n" in text
    assert "| MTU hole | no: nothing | 21 | no | nothing |\n" in text
    assert "| loss of 1 % | no: nothing | 21 | after 31 s: exit code 1, as without a fault | nothing |\n" in text
    words = " ".join(text.split())
    assert "for 1 of 4 faults. Without a fault, it found something in 1 of 2 examinations." in words
    assert "the cause or the machine of 1 of 4 faults. On 3 ranks, it fails" in words


def test_there_is_no_section_without_results() -> None:
    assert section_of({}) == ""
