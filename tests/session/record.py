"""The last green run of what `make test` leaves out, in a file that is committed: tests/results/*.json."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results"


class Recorder:
    def __init__(self, file: Path, load: float) -> None:
        self._file, self._load = file, load
        self._outcomes: Counter[str] = Counter()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """A run that failed, or was ended, leaves the last green one where it is."""
        if exitstatus != pytest.ExitCode.OK:
            return
        found: dict[str, Any] = {
            "commit": _git("rev-parse", "HEAD"),
            "clean": not _git("status", "--porcelain", "--", "src", "tests"),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "passed": self._outcomes["passed"],
            "skipped": self._outcomes["skipped"],
            "seconds": round(time.monotonic() - self._began),
            "cores": os.cpu_count(),
            "load_before": round(self._load, 2),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(found, indent=2) + "\n")


class Told:
    """What tests have to say though they pass: their property `says`, at the end of the run."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._lines += [text for name, text in report.user_properties if name == "says"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self._lines:
            terminalreporter.write_line(line)


def line_of(name: str, folder: Path = RESULTS) -> str:
    """What README.md says of the last run of `make NAME`."""
    file = folder / f"{name}.json"
    if not file.exists():
        return f"`make {name}`: no run is recorded"
    found = json.loads(file.read_text())
    minutes = max(1, round(found["seconds"] / 60))
    changed = "" if found["clean"] else ", with changes that were not committed"
    return (
        f"`make {name}`: {found['passed']} passed, {found['skipped']} skipped, {minutes} minutes on {found['cores']} "
        f"cores, {found['date']}, commit {found['commit'][:10]}{changed}"
    )


def distance_of(name: str, folder: Path = RESULTS) -> str:
    """How far src/ has gone since, as the history tells."""
    file = folder / f"{name}.json"
    if not file.exists():
        return "no run"
    try:
        behind = _git("rev-list", "--count", f"{json.loads(file.read_text())['commit']}..HEAD", "--", "src")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return "a commit that this history does not hold"
    return f"{behind} commits to src/ since"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
