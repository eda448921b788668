"""A sharded model and its twin: the same model, whole on every rank, whose gradients are averaged by one all-reduce.

For use inside a rank. That the twin trains as one process would is test_parity.py's matter: it compares with one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from tests.ranks.models import DEVICE, MODELS
from tests.ranks.reference import optimizer_for
from tests.ranks.strategies import strategy_of
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.errors import StepError, TowpathError

# Loss of a model, given the rank, the micro-step and the step whose batch to use.
Loss = Callable[[nn.Module, int, int, int], Tensor]

QUEUES = (
    {TransferKind.GATHER, TransferKind.BACKWARD_GATHER},
    {TransferKind.REDUCE},
    {TransferKind.GRAD_SYNC, TransferKind.UNUSED_PARAMS},
    {TransferKind.PARAM_SYNC},
)

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
        assert topology.world == dist.get_world_size()
        self.plain: nn.Module = _build(build)
        self.plain_optimizer = optimizer_for(self.plain)
        model = _build(build)
        before = optimizer_for(model) if optimizer_first else None
        self.sharded: Any = towpath.shard(model, strategy_of(label, topology), topology=topology, **options)
        self.optimizer = before or optimizer_for(self.sharded)

    def backward(self, step: int = 0, micro_steps: int = 1) -> None:
        """One accumulation, up to and with its boundary."""
        for micro in accumulating(self.sharded, micro_steps):
            (self.loss(self.sharded, dist.get_rank(), micro, step) / micro_steps).backward()
        with mean_of_all_ranks(self.plain):
            for micro in range(micro_steps):
                (self.loss(self.plain, dist.get_rank(), micro, step) / micro_steps).backward()

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
                _check_slice(name, found.grad, expected.grad)

    def check_parameters(self) -> None:
        for name, expected, found in self._pairs():
            _check_slice(name, found, expected.detach())

    def _pairs(self) -> list[tuple[str, Any, Any]]:
        found = dict(self.sharded.named_parameters())
        expected = dict(self.plain.named_parameters())
        assert list(found) == list(expected)
        return [(name, expected[name], found[name]) for name in expected]


def accumulating(model: Any, count: int) -> Generator[int]:
    """The numbers of the micro-steps of an accumulation. All but the last one run without a boundary."""
    for micro in range(count):
        with nullcontext() if micro == count - 1 else model.no_sync():
            yield micro


def by_queue(transfers: Iterable[Transfer]) -> list[list[Transfer]]:
    """The transfers of each queue, in their order. Queues run beside one another."""
    listed = list(transfers)
    return [[t for t in listed if t.kind in kinds] for kinds in QUEUES]


def error_of(action: Callable[[], Any], kind: type[TowpathError] = StepError) -> str:
    """What an action is refused with."""
    import pytest  # tools/gpu.py runs without it

    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


@contextmanager
def mean_of_all_ranks(plain: nn.Module) -> Generator[None]:
    """What is added to the gradients inside is the mean of what all ranks compute, as plainly as can be."""
    parameters = list(plain.parameters())
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    yield
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float64, device=parameters[0].device)
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    total = torch.cat([used, *(g.flatten() for g in own)])
    dist.all_reduce(total)
    total /= dist.get_world_size()
    used, *means = total.split([len(own), *(g.numel() for g in own)])
    for p, old, share, mean in zip(parameters, before, used.tolist(), means, strict=True):
        new = mean.view(p.shape).to(p.dtype) if share else None
        p.grad = new if old is None else old if new is None else old.add_(new)


def _build(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build().double().to(DEVICE)


def _check_slice(name: str, found: towpath.ShardTensor, expected: Tensor) -> None:
    off = distance(found, expected)
    assert off <= TOLERANCE, f"{name} is {off:.1e} off"


def distance(found: towpath.ShardTensor, expected: Tensor) -> float:
    """Of what this rank holds. All ranks together ask for every element, and nothing has to be gathered."""
    assert found.shape == expected.shape
    start, end = found.shard_spec.bounds()
    local = found.to_local().detach()
    off = (local - expected.reshape(-1)[start:end].to(local.device)).abs()
    return off.max().item() if end > start else 0.0
