"""What each test took, with its fixtures: the ten slowest at the end of a run, and the tests over the limit.

On a machine that was idle when the run began, such a test fails the run. On a busy one it is only named, because others
have used the processors too.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

LIMIT_SECONDS = 20.0
IDLE_LOAD = 0.5
SLOWEST = 10


class Ledger:
    """In the process that reports."""

    def __init__(self) -> None:
        self.load = os.getloadavg()[0]
        self._seconds: Counter[str] = Counter()
        self._unlimited: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration  # pyright: ignore[reportArgumentType]
        # What compiles from nothing takes what the compiler takes, and a soak is meant to take long.
        if {"compiles", "soak"} & report.keywords.keys():
            self._unlimited.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._too_slow() and self.load < IDLE_LOAD and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if len(self._seconds) <= SLOWEST and not self._too_slow():
            return
        terminalreporter.section(f"the slowest tests (load before the run: {self.load:.2f})")
        for test, seconds in self._seconds.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:7.1f} s  {test}")
        verdict = "fails the run" if self.load < IDLE_LOAD else "on a machine that was not idle"
        for test in self._too_slow():
            terminalreporter.write_line(f"over {LIMIT_SECONDS:.0f} s, {verdict}: {test}")

    def _too_slow(self) -> list[str]:
        return [t for t, s in self._seconds.items() if s > LIMIT_SECONDS and t not in self._unlimited]
