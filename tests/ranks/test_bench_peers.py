"""The peers of the benchmarks train as they do without our help."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.peers import build
from benchmarks.workload import Workload
from tests.ranks.server import World
from tests.ranks.strategies import seldom
from towpath.topology.cluster import Topology

Worlds = Callable[[int], World]

WORKLOAD = Workload(Topology(2, 2), micro_steps=2, width=24, depth=2, batch=1, length=8)


@pytest.mark.parametrize("peer", ["fsdp2", seldom("hsdp")])
def test_our_ring_gives_fsdp2_the_gradients_of_its_own_reduce_scatter(world: Worlds, peer: str) -> None:
    world(4).run(_compare, f"{peer} tuned", f"{peer} tuned ring")


def _compare(plain: str, ring: str) -> None:
    """In float64: sums of another order differ in the last bits only."""
    first, second = (_gradients(candidate) for candidate in (plain, ring))
    assert first.keys() == second.keys() and first
    for name, gradient in first.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(second[name], gradient, rtol=1e-9, atol=1e-12)


def _gradients(candidate: str) -> dict[str, torch.Tensor]:
    model, context = build(candidate, WORKLOAD)
    model.to(torch.float64)
    data = WORKLOAD.data(torch.distributed.get_rank())
    for micro in range(WORKLOAD.micro_steps):
        with context(model, micro == WORKLOAD.micro_steps - 1):
            model(*next(data)).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
