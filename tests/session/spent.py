"""What each test took: seconds, and processor seconds of the worker, its ranks and its commands.

At the end of a run: the ten slowest, the files that took most, and the tests over the limit. On a machine that was idle
when the run began such a test fails the run; on a busy one it is named, since its seconds are the neighbours' too.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

LIMIT_SECONDS = 20.0
IDLE_LOAD = 0.5
SLOWEST = 10

_TICKS = os.sysconf("SC_CLK_TCK")

Section = Callable[[str], None]


class Meter:
    """In every worker: puts `spent` on the report of a test's teardown, what its fixtures took included."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        self._began, self._cpu = time.monotonic(), processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        if call.when == "teardown":
            spent = {"seconds": time.monotonic() - self._began, "cpu": processor_seconds() - self._cpu}
            spent["compiles"] = item.get_closest_marker("compiles") is not None
            spent["soak"] = item.get_closest_marker("soak") is not None
            item.user_properties.append(("spent", spent))
        return (yield)


class Ledger:
    """In the process that reports: keeps what the workers measured."""

    def __init__(self, file: Path | None) -> None:
        self.load = os.getloadavg()[0]
        self._file = file
        self._spent: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = dict(report.user_properties).get("spent")
        if report.when != "teardown" or spent is None:
            return
        self._spent[report.nodeid] = spent
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps({"test": report.nodeid, **spent}) + "\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._too_slow() and self.load < IDLE_LOAD and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if len(self._spent) <= SLOWEST and not self._too_slow():
            return
        tell = terminalreporter.write_line
        terminalreporter.section(f"the slowest tests (load before the run: {self.load:.2f})")
        for test in sorted(self._spent, key=lambda t: -self._spent[t]["seconds"])[:SLOWEST]:
            tell(_line(test, self._spent[test]))
        files: Counter[str] = Counter()
        for test, spent in self._spent.items():
            files[test.partition("::")[0]] += spent["cpu"]
        tell(f"processor seconds: {files.total():.0f}, of which")
        for file, seconds in files.most_common(SLOWEST):
            tell(f"{seconds:8.1f}  {file}")
        for test in self._too_slow():
            verdict = "fails the run" if self.load < IDLE_LOAD else "on a machine that was not idle"
            tell(f"over {LIMIT_SECONDS:.0f} s, {verdict}: {_line(test, self._spent[test])}")

    def _too_slow(self) -> list[str]:
        """What compiles from nothing takes what the compiler takes, and a soak is meant to take long."""
        timed = {t: s for t, s in self._spent.items() if not (s["compiles"] or s["soak"])}
        return [t for t, s in timed.items() if s["seconds"] > LIMIT_SECONDS]


def _line(test: str, spent: dict[str, Any]) -> str:
    compiles = "  (compiles)" if spent["compiles"] else ""
    return f"{spent['seconds']:7.1f} s {spent['cpu']:7.1f} cpu s  {test}{compiles}"


def processor_seconds() -> float:
    """Of this process, of its ended children, and of all that live below it."""
    own = sum(os.times()[:4])
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # most workers of unit tests have none, and to look is slow
        return own
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for parent, pid, taken in _processes():
        parents[pid], seconds[pid] = parent, taken

    def ours(pid: int) -> bool:
        while (pid := parents.get(pid, 0)) != os.getpid():
            if not pid:
                return False
        return True

    return own + sum(seconds[pid] for pid in parents if ours(pid))


def _processes() -> Generator[tuple[int, int, float]]:
    """Parent, id and seconds of every process of this machine."""
    for name in os.listdir("/proc"):  # noqa: PTH208 (a Path for each process would cost more than the rest)
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has just ended
                continue
            yield int(fields[1]), int(name), sum(map(int, fields[11:15])) / _TICKS
