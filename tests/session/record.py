"""Write a summary of a run that reached its end to the file of `--record-to`, whether it passed or failed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OUTCOMES = ("passed", "failed", "skipped")


class Recorder:
    def __init__(self, file: Path, load: float) -> None:
        self._file, self._load = file, load
        self._outcomes: defaultdict[str, dict[str, str]] = defaultdict(dict)  # by file and test
        self._began = time.monotonic()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that could not be imported, or that was skipped as a whole."""
        if report.outcome != "passed" and report.nodeid.endswith(".py"):
            self._outcomes[report.nodeid][""] = report.outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test ended. What its fixtures do counts, too: a test fails at most once."""
        file, _, test = report.nodeid.partition("::")
        if report.when == "call" or report.outcome != "passed":
            failed = self._outcomes[file].get(test) == "failed"
            self._outcomes[file][test] = "failed" if failed else report.outcome

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the file, unless the run was interrupted."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        files = {file: Counter(tests.values()) for file, tests in sorted(self._outcomes.items())}
        total = sum(files.values(), Counter[str]())
        changed = _git("status", "--porcelain", "--", "src", "tests")
        found: dict[str, Any] = {
            "selected": session.config.option.markexpr,
            "commit": _git("rev-parse", "HEAD"),
            "clean": None if changed is None else not changed,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            **_counts(total),
            "seconds": round(time.monotonic() - self._began),
            "cores": os.cpu_count(),
            "load_before": round(self._load, 2),
            "files": {file: _counts(count) for file, count in files.items()},
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(found, indent=2) + "\n")


def _counts(count: Counter[str]) -> dict[str, int]:
    return {outcome: count[outcome] for outcome in OUTCOMES}


def _git(*arguments: str) -> str | None:
    """What git says, or None where there is no git, or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
