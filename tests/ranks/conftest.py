"""Worlds of ranks that stay warm between tests, and a folder that all pytest workers share."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.ranks.server import World
from tests.ranks.strategies import leave_to_parity

# Process groups live as long as the processes that made them, and each has a thread that looks a hundred times a second
# whether it is to end: of a world that has many, this costs more than to make another.
THREADS_OF_A_RANK = 80
# Those of a world that waits until its size is wanted again.
THREADS_OF_A_WAITING_RANK = 40

_live: list[World] = []  # the one that was used last comes first


@pytest.fixture(scope="session")
def world() -> Callable[[int], World]:
    """`world(4)`: four ranks. A world stays until its file ends, two other sizes have been wanted, a rank failed, or it
    has too many threads."""

    def of(size: int) -> World:
        fitting = [each for each in _live if each.size == size and _is_fit(each, THREADS_OF_A_RANK)]
        others = [each for each in _live if each not in fitting]
        waiting = [each for each in others if each.size != size and _is_fit(each, THREADS_OF_A_WAITING_RANK)][:1]
        for each in others:
            if each not in waiting:
                each.close()
        _live[:] = [*fitting, *waiting]
        if not fitting:
            _live.insert(0, World(size))
        return _live[0]

    return of


def _is_fit(ranks: World, threads: int) -> bool:
    return ranks.alive and ranks.threads <= threads


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """End the worlds with the last test of a file.

    What a file leaves behind in its ranks meets no other file, and no ranks wait while another folder is tested.
    pytest calls this hook of every conftest.py for the items of all folders, so it must not look at its own folder.
    """
    done = yield
    if nextitem is None or nextitem.path != item.path:
        _end()
    return done


def _end() -> None:
    while _live:
        _live.pop().close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_parity(items)


@pytest.fixture(scope="session")
def whole_product(request: pytest.FixtureRequest) -> bool:
    """Whether this is `make parity`, where nothing is left out."""
    return "not parity" not in request.config.option.markexpr


@pytest.fixture(scope="session")
def steps(whole_product: bool) -> int:
    """Of a training that is compared with one process: five in `make parity`, and in `make test` the first, one on what
    it updated, and one in the steady state."""
    return 5 if whole_product else 3


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """One folder a session, the same one for every worker of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base
