"""`towpath.wires` under DistributedDataParallel: low rank, feedback by bucket, and errors of transfers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import towpath
from tests.ranks.server import on_ranks
from towpath import Topology
from towpath.core.strategy import TransferKind
from towpath.engine.transfer_queues import RankTransfer
from towpath.errors import ConfigError, ShardError, StepError

FLAT = Topology(2, 1)


class Layers(nn.Module):
    """Layers of one size. With `leaves_out`, every third pass is without the last one."""

    def __init__(self, leaves_out: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.turned = nn.Parameter(torch.randn(10, 16).t())  # in memory, its columns come one after the other
        self.leaves_out, self.passes = leaves_out, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        for layer in self.layers[: 2 if self.leaves_out and self.passes % 3 == 0 else 3]:
            x = layer(x).tanh()
        return x @ self.turned


def batch(number: int, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(rows, 16, generator=generator, dtype=torch.float64)


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradients(wired: bool, options: dict[str, Any]) -> list[Tensor]:
    """Train four steps of two rows on each of two ranks: gradients of rank four. Return all of them."""
    torch.manual_seed(0)
    layers = Layers("find_unused_parameters" in options).double()
    model = DistributedDataParallel(layers, bucket_cap_mb=0.003, **options)
    if wired:
        towpath.wires(model, gradients="low-rank:4", topology=FLAT)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-3), list[Tensor]()
    for step in range(4):
        for micro in range(2):
            # DDP itself cannot begin a static graph inside `no_sync`.
            with nullcontext() if micro or "static_graph" in options else model.no_sync():
                model(batch(2 * step + micro)).square().sum().backward()
        seen += [grad.clone() for grad in grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    if wired:
        sums = [each for each in towpath.stats(model).transfers if each.transfer.kind is TransferKind.GRAD_SYNC]
        elements = [each.transfer.elements for each in sums]
        assert 4 * 16 in elements or 3 * 4 * 16 in elements, "the factor Q of one layer, or of all"
        assert 16 * 16 not in elements
    return seen


OPTIONS = ({}, {"static_graph": True}, {"find_unused_parameters": True, "gradient_as_bucket_view": True})


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "default"))
@on_ranks(2)
def test_gradients_of_low_rank_lose_nothing_in_factors_of_that_rank(options: dict[str, Any]) -> None:
    for expected, found in zip(gradients(False, options), gradients(True, options), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@on_ranks(2)
def test_matrices_of_higher_rank_are_fed_back() -> None:
    """The same gradient again and again: its mean comes closer to the exact one."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16).double()
    model, rows = DistributedDataParallel(layer), batch(0, 32)
    model(rows).square().sum().backward()
    exact = [grad.clone() for grad in grads(layer)]
    towpath.wires(model, gradients="low-rank:4", topology=FLAT)
    errors, mean = list[float](), [torch.zeros_like(each) for each in exact]
    for turn in range(1, 17):
        model.zero_grad()
        model(rows).square().sum().backward()
        mean = [sum_ + grad for sum_, grad in zip(mean, grads(layer), strict=True)]
        errors.append(float((mean[0] / turn - exact[0]).norm() / exact[0].norm()))
        torch.testing.assert_close(mean[1] / turn, exact[1], rtol=1e-12, atol=1e-12)  # a vector is not factored
    assert 0.3 < errors[0] < 1, errors
    assert errors[-1] < 0.3 * errors[0], errors


class Swapped(nn.Module):
    """Two layers whose gradients arrive in another order than DDP expects at first."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        large = self.large(x).sum() * 1e3
        return large + self.small(x).sum() * 1e-3


@on_ranks(2)
def test_feedback_is_not_added_to_other_parameters_when_ddp_rebuilds_buckets() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Swapped())
    towpath.wires(model, gradients="int8", topology=FLAT)
    rows, found = batch(0, 8).float(), list[Tensor]()
    for _ in range(3):
        model.zero_grad()
        model(rows).backward()
        found.append(model.module.small.weight.grad.clone())
    assert float(found[1].abs().max()) < 0.1, "not the large layer's rounding error"
    assert float(found[0].abs().max()) > 0


@on_ranks(2)
def test_sparse_gradients_are_averaged_as_ddp_does() -> None:
    averaged: list[Tensor] = []
    for wired in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 16)))
        if wired:
            towpath.wires(model, gradients="low-rank:1", topology=FLAT)
        model(torch.tensor([1, 2, 3 + dist.get_rank()])).sum().backward()
        averaged.append(grads(model)[0])
    assert averaged[1].is_sparse
    assert torch.equal(averaged[0].to_dense(), averaged[1].to_dense())


@pytest.mark.parametrize("case", ["default", "static_graph", "join"])
@on_ranks(2)
def test_a_transfer_that_fails_is_a_step_error_of_the_backward_pass(case: str) -> None:
    def fail(transfer: RankTransfer, *_: Any) -> None:
        raise StepError(f"rank {dist.get_rank()}: {transfer.transfer} failed: lost")

    model = DistributedDataParallel(nn.Linear(4, 4), static_graph=case == "static_graph")
    towpath.wires(model, topology=FLAT)
    with (
        patch.object(RankTransfer, "run", autospec=True, side_effect=fail),
        pytest.raises(StepError, match=rf"^rank {dist.get_rank()}: grad_sync of bucket 0.*: lost$"),
        model.join(enable=case == "join"),
    ):
        for _ in range(dist.get_rank() if case == "join" else 1):  # rank 0 has run out of batches, and only reduces
            model(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_low_rank_is_refused_where_it_cannot_work() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(ShardError, match=r"low-rank:4 makes no gradient.*largest matrix has 4 × 4.*smaller rank"):
        towpath.wires(model, gradients="low-rank:4", topology=FLAT)
    with pytest.raises(ConfigError, match="Write 'low-rank:' and the rank"):
        towpath.wires(model, gradients="low-rank", topology=FLAT)
