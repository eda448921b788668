"""A sharded model and its twin: the same model in one process, fed every rank's batches. For use inside a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from tests.ranks.models import MODELS
from tests.ranks.reference import optimizer_for
from tests.ranks.strategies import strategy_of

# Loss of a model, given the rank, the micro-step and the step whose batch to use.
Loss = Callable[[nn.Module, int, int, int], Tensor]

# In float64 only the order of sums differs; what is compared is of order 1 and a few steps old.
TOLERANCE = 1e-10


def loss_on(name: str, dtype: torch.dtype = torch.float64) -> Loss:
    """The loss of one of the models of tests/ranks/models.py."""
    entry = MODELS[name]
    return lambda model, rank, micro, step: entry.loss(model, *entry.micro_batch(rank, micro, step, dtype))


class Twin:
    """`sharded` and `plain`: alike at first, and to stay so."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loss: Loss,
        label: str,
        topology: towpath.Topology,
        optimizer_first: bool = False,
        **options: Any,
    ) -> None:
        self.loss = loss
        self.world = topology.world
        self.plain: nn.Module = _build(build)
        self.plain_optimizer = optimizer_for(self.plain)
        model = _build(build)
        before = optimizer_for(model) if optimizer_first else None
        self.sharded: Any = towpath.shard(model, strategy_of(label, topology), topology=topology, **options)
        self.optimizer = before or optimizer_for(self.sharded)

    def backward(self, step: int = 0, micro_steps: int = 1) -> None:
        """One accumulation, up to and with its boundary."""
        for micro in range(micro_steps):
            with nullcontext() if micro == micro_steps - 1 else self.sharded.no_sync():
                (self.loss(self.sharded, dist.get_rank(), micro, step) / micro_steps).backward()
        for rank in range(self.world):
            for micro in range(micro_steps):
                (self.loss(self.plain, rank, micro, step) / (micro_steps * self.world)).backward()

    def step(self, set_to_none: bool = True) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    def train(self, steps: int, micro_steps: int = 1) -> None:
        for step in range(steps):
            self.backward(step, micro_steps)
            self.step()

    def check_gradients(self) -> None:
        """Every gradient is the twin's; where the twin has none, there is none."""
        for name, expected, found in self._pairs():
            assert (found.grad is None) == (expected.grad is None), (
                f"{name}: grad is {found.grad}, expected {expected.grad}"
            )
            if expected.grad is not None:
                _check_close(name, found.grad.full_tensor(), expected.grad)

    def check_parameters(self) -> None:
        for name, expected, found in self._pairs():
            _check_close(name, found.full_tensor(), expected.detach())

    def _pairs(self) -> list[tuple[str, Any, Any]]:
        found = dict(self.sharded.named_parameters())
        expected = dict(self.plain.named_parameters())
        assert list(found) == list(expected)
        return [(name, expected[name], found[name]) for name in expected]


def _build(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build().double()


def _check_close(name: str, found: Tensor, expected: Tensor) -> None:
    distance = (found - expected).abs().max().item()
    assert distance <= TOLERANCE, f"{name} is {distance:.1e} off"
