"""Gradients in low rank on real ranks: exact where they are of low rank, and nothing is lost where they are not.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import seldom
from towpath.engine.parameters.low_rank_sync import LowRankSync

SHAPE = towpath.Topology(2, 2)
WHOLE = ("ddp", "zero1", "paro-nng", "paro-nni")
WIDTH = 24


def _model() -> nn.Module:
    torch.manual_seed(3)
    blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x * self.scale

    return Chain()


def _input(step: int, rank: int, samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)


def _sharded(name: str, **options: Any) -> Any:
    return towpath.shard(_model(), towpath.strategy(name, SHAPE, **options))


def _backward(model: Any, step: int, samples: int = 1) -> None:
    model(_input(step, dist.get_rank(), samples)).square().sum().backward()


def _gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad.full_tensor().clone() for p in model.parameters()]


def _grad_syncs(model: Any) -> list[LowRankSync]:
    buckets = [bucket for unit in model.towpath_engine.units for bucket in unit.buckets]
    return [bucket.gradients.low_rank for bucket in buckets if bucket.gradients.low_rank is not None]


@pytest.mark.parametrize("name", [seldom(name) if name in ("ddp", "paro-nng", "paro-nni") else name for name in WHOLE])
def test_sums_of_as_many_samples_as_the_rank_are_exact(world: Worlds, name: str) -> None:
    world(4).run(_exact, name)


def _exact(name: str) -> None:
    """One sample on each of four ranks: a weight's gradient is the sum of four products of two vectors."""
    plain, coded = _sharded(name), _sharded(name, gradients="low-rank:4")
    assert _grad_syncs(coded) and not _grad_syncs(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (plain, coded)]
    for step in range(5):
        norms: list[float] = []
        for model, optimizer in zip((plain, coded), optimizers, strict=True):
            optimizer.zero_grad()
            _backward(model, step)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        for mine, theirs in zip(_gradients(coded), _gradients(plain), strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)
        assert norms[0] == pytest.approx(norms[1], rel=1e-9)
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(coded.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.full_tensor(), theirs.full_tensor(), rtol=0, atol=1e-9)


@on_ranks(4)
def test_what_came_out_and_what_is_kept_is_all_that_went_in() -> None:
    """Over several steps: the sums that were delivered, and what all ranks still keep, are all that was summed."""
    plain, coded = _sharded("ddp"), _sharded("ddp", gradients="low-rank:2")
    went_in = [torch.zeros_like(p) for p in _model().parameters()]
    came_out = [torch.zeros_like(p) for p in went_in]
    for step in range(4):
        for model, total in ((plain, went_in), (coded, came_out)):
            model.zero_grad()
            _backward(model, step, samples=5)
            for sum_, gradient in zip(total, _gradients(model), strict=True):
                sum_.add_(gradient, alpha=4)
    kept = [error.clone() for grad_sync in _grad_syncs(coded) for error in _errors(grad_sync)]
    for error in kept:
        dist.all_reduce(error)
    assert any(float(error.norm()) > 1e-3 for error in kept), "rank 2 misses something of these"
    matrices = [(a, b) for a, b in zip(came_out, went_in, strict=True) if a.dim() == 2]
    for (out, into), error in zip(matrices, kept, strict=True):
        assert torch.allclose(out + error, into, rtol=0, atol=1e-11)
    for out, into in zip(came_out, went_in, strict=True):
        if out.dim() == 1:
            assert torch.allclose(out, into, rtol=0, atol=1e-12), "what is no matrix travels as it is"


def _errors(grad_sync: LowRankSync) -> list[torch.Tensor]:
    _, errors = grad_sync.state
    sizes = [m.rows * m.columns for m in grad_sync.factored.matrices]
    return [e.view(m.rows, m.columns) for e, m in zip(errors.split(sizes), grad_sync.factored.matrices, strict=True)]


@on_ranks(4)
def test_without_feedback_nothing_but_where_to_start_is_kept() -> None:
    model = _sharded("zero1", gradients="low-rank:2", feedback="none")
    _backward(model, 0, samples=5)
    assert all(len(grad_sync.state) == 1 for grad_sync in _grad_syncs(model))


@on_ranks(4)
def test_a_step_that_is_not_finite_leaves_what_is_kept_as_it_was() -> None:
    model, twin = (_sharded("ddp", gradients="low-rank:2") for _ in range(2))
    for each in (model, twin):
        _backward(each, 0, samples=5)
        each.zero_grad()
    before = [[kept.clone() for kept in grad_sync.state] for grad_sync in _grad_syncs(model)]
    poison = torch.full((WIDTH,), float("inf") if dist.get_rank() == 2 else 1.0, dtype=torch.float64)
    (model(_input(1, dist.get_rank(), 5)) * poison).square().sum().backward()
    assert not all(bool(g.isfinite().all()) for g in _gradients(model)), "an overflow is never hidden"
    for grad_sync, kept in zip(_grad_syncs(model), before, strict=True):
        assert all(torch.equal(mine, was) for mine, was in zip(grad_sync.state, kept, strict=True))
    model.zero_grad()
    for each in (model, twin):
        _backward(each, 2, samples=5)
    for mine, theirs in zip(_gradients(model), _gradients(twin), strict=True):
        assert torch.equal(mine, theirs)


@on_ranks(4)
def test_the_first_steps_may_travel_as_they_are() -> None:
    made = towpath.strategy("zero1", SHAPE, gradients="low-rank:2")
    made = replace(made, grad_sync=replace(made.grad_sync, after=2))
    model: Any = towpath.shard(_model(), made)
    plain = _sharded("zero1", route="ho-ring")
    for step in range(4):
        for each in (model, plain):
            each.zero_grad()
            _backward(each, step, samples=5)
        same = [torch.equal(a, b) for a, b in zip(_gradients(model), _gradients(plain), strict=True)]
        matrices = [p.dim() == 2 for p in _model().parameters()]
        assert bool(_grad_syncs(model)) == (step >= 1), "of the step that comes"
        assert all(same) if step < 2 else not any(s for s, is_matrix in zip(same, matrices, strict=True) if is_matrix)
        executed = {(t.kind, t.elements) for t in towpath.stats(model).last_step}
        planned = {(t.kind, t.elements) for t in towpath.schedule(made.at(step), model).transfers}
        assert executed <= planned
