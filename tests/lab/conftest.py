"""Labs that many tests share, and the reason why there are none."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence

import pytest

from lab import Cable, Lab, available
from lab.lab import PRELOAD
from tests.lab.warm import warm_lab
from towpath.topology.cluster import Topology

# Loaded once for each lab: else each rank of each call would import them.
OF_TRAINING = (*PRELOAD, "towpath.api", "tests.lab.test_bytes", "tests.lab.test_routes")


@pytest.fixture(scope="session", autouse=True)
def kernel_allows_labs() -> None:
    """Skip the folder, test by test, where no lab can be raised; but a lab that is broken is no reason to skip."""
    reason = available()
    if reason is None:
        return
    tools = all(map(shutil.which, ("ip", "tc", "unshare")))
    if (
        tools
        and os.geteuid() == 0
        and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
    ):
        pytest.fail(f"this machine allows namespaces, and yet: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def lab(kernel_allows_labs: None) -> Iterator[Callable[..., Lab]]:
    """`lab(2, 2, inter="200mbit")`: a lab of 2 nodes × 2 ranks, raised once a session. Leave it as you found it."""
    raised: dict[tuple[object, ...], Lab] = {}

    def of(
        nodes: int,
        ranks: int | tuple[int, ...],
        inter: str | tuple[Cable, ...] | None = None,
        intra: str | None = None,
        preload: Sequence[str] = OF_TRAINING,
    ) -> Lab:
        shape = (nodes, ranks, inter, intra, preload)
        if shape not in raised:
            raised[shape] = warm_lab(Topology(nodes, ranks), inter=inter, intra=intra, preload=preload)
        return raised[shape]

    yield of
    for each in raised.values():
        each.close()
