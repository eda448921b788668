"""The worlds of tests/ranks, for this folder, too: each test runs in a process of its own kind."""

from __future__ import annotations

from tests.ranks import conftest as ranks

world = ranks.world
pytest_runtest_protocol = ranks.pytest_runtest_protocol
pytest_collection_modifyitems = ranks.pytest_collection_modifyitems
