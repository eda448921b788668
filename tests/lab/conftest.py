"""Labs that many tests share, and the reason why there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from towpath.lab import Lab, available
from towpath.topology.cluster import Topology


@pytest.fixture(scope="session", autouse=True)
def kernel_allows_labs() -> None:
    """Skip the folder, test by test, where no lab can be raised."""
    reason = available()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def lab(kernel_allows_labs: None) -> Iterator[Callable[..., Lab]]:
    """`lab(2, 2, inter="200mbit")`: a lab of 2 nodes × 2 ranks, raised once a session. Leave it as you found it."""
    raised: dict[tuple[object, ...], Lab] = {}

    def of(
        nodes: int,
        ranks: int,
        inter: str | None = None,
        intra: str | None = None,
        preload: tuple[str, ...] = ("torch", "torch.distributed"),
    ) -> Lab:
        shape = (nodes, ranks, inter, intra, preload)
        if shape not in raised:
            raised[shape] = Lab(Topology(nodes, ranks), inter=inter, intra=intra, preload=preload)
        return raised[shape]

    yield of
    for each in raised.values():
        each.close()
