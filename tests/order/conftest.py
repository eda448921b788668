"""The worlds of tests/ranks, for this folder, too."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.ranks import conftest as ranks
from tests.ranks.strategies import leave_to_parity

world = ranks.world


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    done = yield
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        ranks._end()
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_parity(items)
