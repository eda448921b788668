"""Each reason for which tests were skipped, once, with how many there were."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest


class Skips:
    def __init__(self) -> None:
        self._tests: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Of a whole module."""
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._tests[report.longrepr[2].removeprefix("Skipped: ")].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._tests:
            return
        terminalreporter.section("skipped")
        for reason, tests in sorted(self._tests.items(), key=lambda pair: -len(pair[1])):
            files = sorted({test.partition("::")[0] for test in tests})
            terminalreporter.write_line(f"{len(tests):5d}  {reason}  ({', '.join(files)})")
