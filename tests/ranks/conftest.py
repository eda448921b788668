"""Worlds of ranks that stay warm between tests, and a folder that all pytest workers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks.server import World

# Process groups live as long as the processes that made them, and each has a thread that looks a hundred times a second
# whether it is to end: a world that has many leaves the tests beside it a third of the machine.
THREADS_OF_A_RANK = 40


@pytest.fixture(scope="module")
def world() -> Iterator[Callable[[int], World]]:
    """`world(4)`: four ranks. A world stays until another size is wanted, a rank failed, or it has too many threads."""
    live: list[World] = []

    def of(size: int) -> World:
        if live and live[0].alive and live[0].size == size and live[0].threads <= THREADS_OF_A_RANK:
            return live[0]
        while live:
            live.pop().close()
        live.append(World(size))
        return live[0]

    yield of
    while live:
        live.pop().close()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """One folder a session, the same one for every worker of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base
