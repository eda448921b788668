"""What every session of tests does: it measures, requires, and records. The parts: tests/session/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session import record, required
from tests.session.collector import rarely_collect
from tests.session.order import Scheduling, longest_first
from tests.session.spent import Ledger


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("towpath")
    group.addoption("--require", default="", help="native,lab,triton: end at once where one is missing (CI=true: all)")
    group.addoption("--may-miss", default="", help="what of these may be missing all the same")
    group.addoption(
        "--record-to", type=Path, help="at the end, write commit, date, counts by file and duration to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # of pytest-xdist: another process reports
    config.pluginmanager.register(Scheduling())
    ledger = Ledger()
    config.pluginmanager.register(ledger)
    if config.getoption("--record-to"):
        config.pluginmanager.register(record.Recorder(config.getoption("--record-to"), ledger.load))


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and (reasons := required.reasons_against(session.config)):
        raise pytest.UsageError(*reasons)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = longest_first(items)


def pytest_collection_finish() -> None:
    rarely_collect()
