"""The peers of the benchmarks train as they do without our help."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from benchmarks import deepspeed_peer
from benchmarks.peers import TrainStep, build
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


@pytest.mark.parametrize("candidate", ["deepspeed tuned stage=1", "deepspeed stage=3 hpz"])
def test_deepspeed_trains_as_ddp_does(world: Worlds, candidate: str) -> None:
    if not deepspeed_peer.installed():
        pytest.skip(f"DeepSpeed is not installed; {deepspeed_peer.FOLDER} names no folder that has it")
    for ours, theirs in world(4).run(_losses, candidate):
        assert theirs == pytest.approx(ours, rel=1e-4)  # in float32, whose sums differ in their order


def _losses(candidate: str) -> tuple[float, float]:
    """Of every rank's own data, after three steps."""
    place = {"LOCAL_RANK": str(torch.distributed.get_rank() % 2)}  # DeepSpeed insists on it
    with mock.patch.dict(os.environ, place), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed's are not ours to mend
        return _loss("ddp"), _loss(candidate)


def _loss(candidate: str) -> float:
    step = TrainStep(torch.distributed.get_rank(), 4, candidate, WORKLOAD)
    for _ in range(3):
        step.sample()
    with torch.no_grad():
        inputs, targets = next(WORKLOAD.data(torch.distributed.get_rank()))
        return float(step._model(inputs, targets))  # pyright: ignore[reportPrivateUsage]
