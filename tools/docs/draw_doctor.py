"""The section of docs/guides/doctor.md on faults in the lab: what the doctor and `accelerate test` said of each.

Without results of the doctor there is no section.
"""

from __future__ import annotations

import textwrap
from collections.abc import Container, Mapping
from typing import Any

from tools.docs import figures

# As in benchmarks/suites/doctor.py, without loading the lab.
_RIGHT, _CLEAN, _PEER = "right cause and machine", "clean ", "accelerate test, "
_LIMIT_SECONDS = 120
_WIDTH = 120


def faults_section() -> str:
    """Return the table of faults with a heading and what it shows, or nothing before the doctor was measured."""
    measured = {run["case"]["name"]: run for run in figures.runs("doctor") if "failed" not in run}
    return section_of(measured)


def section_of(measured: Mapping[str, figures.Line]) -> str:
    """Return the section for the last run of each case."""
    faults = {name: run for name, run in measured.items() if _RIGHT in _figures(run)}
    if not faults:
        return ""
    peers = {name: measured.get(f"{_PEER}{name}") for name in faults}
    # How many ranks `accelerate test` also fails on without a fault. What it says there is about no fault.
    unfit = {
        len(run["accelerate"]["statuses"])
        for name, run in measured.items()
        if name.startswith(f"{_PEER}{_CLEAN}") and any(run["accelerate"]["statuses"])
    }
    body = [(name, *_of_doctor(run), *_of_peer(peers[name], unfit)) for name, run in faults.items()]
    head = ("fault", "cause and machine right", "seconds", "`accelerate test` ends", "it names")
    right = sum(_is_right(run) for run in faults.values())
    tested = [run["accelerate"] for run in peers.values() if run]
    texts = [
        "`python -m benchmarks doctor` makes one fault at a time in the [lab](lab.md). The first finding has the right "
        f"cause and the right machines for {right} of {len(faults)} faults. {_without_fault(measured)}",
    ]
    if tested:
        named = sum(bool(_named(each, unfit)) for each in tested)
        also = f" On {' and '.join(map(str, sorted(unfit)))} ranks, it fails without a fault, too." if unfit else ""
        texts.append(
            f"`accelerate test` (accelerate {tested[0]['version']}, {_LIMIT_SECONDS} seconds at most) ran on the same "
            f"ranks. It tests whether training works, and names the cause or the machine of {named} of {len(tested)} "
            f"faults.{also} A word for the cause, or a name or address of the machine, in any error of any rank "
            "counts. The version that differs is Towpath's, which it does not use."
        )
    paragraphs = "\n\n".join(textwrap.fill(text.strip(), _WIDTH, break_on_hyphens=False) for text in texts)
    return f"## Faults in the lab\n\n{paragraphs}\n\n{figures.table(head, body)}"


def _figures(run: figures.Line) -> dict[str, float]:
    return {check["what"]: check["found"] for check in run["checks"]}


def _is_right(run: figures.Line) -> bool:
    return _figures(run)[_RIGHT] == 1


def _of_doctor(run: figures.Line) -> tuple[str, str]:
    (found,) = run["examined"]
    said = [f"{each['cause']} of {', '.join(each['machines'])}" for each in found["findings"][:1]]
    return "yes" if _is_right(run) else f"no: {', '.join(said) or 'nothing'}", f"{found['seconds']:.0f}"


def _of_peer(run: figures.Line | None, unfit: Container[int]) -> tuple[str, str]:
    if run is None:
        return "not measured", ""
    found = run["accelerate"]
    also = ", as without a fault" if any(found["statuses"]) and len(found["statuses"]) in unfit else ""
    return _ending(found["statuses"], found["seconds"]) + also, " and ".join(_named(found, unfit)) or "nothing"


def _named(found: Mapping[str, Any], unfit: Container[int]) -> list[str]:
    """Return what a test named of a fault: nothing on as many ranks as it fails on without one."""
    fit = len(found["statuses"]) not in unfit
    return [what for what in ("cause", "machine") if fit and found[f"names_{what}"]]


def _ending(statuses: list[int | None], seconds: float) -> str:
    failed = sorted({status for status in statuses if status})
    codes = f"exit code {', '.join(map(str, failed))}" if failed else "success"
    if None not in statuses:
        return f"after {seconds:.0f} s: {codes}"
    ended = len(statuses) - statuses.count(None)
    return f"on {ended} of {len(statuses)} ranks: {codes}" if ended else "no"


def _without_fault(measured: Mapping[str, figures.Line]) -> str:
    clean = [found for name, run in measured.items() if name.startswith(_CLEAN) for found in run["examined"]]
    alarms = sum(bool(found["findings"]) for found in clean)
    if not clean:
        return ""
    return f"Without a fault, it found something in {alarms} of {len(clean)} examinations."


TABLES = {"doctor-faults": faults_section}
