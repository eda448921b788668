"""Where the host may wait for the device in a step: nowhere but for the sizes of exact messages, and after the step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import towpath
from tests.fake_cuda.running import check_waits, loss_of, net, on_gpus, sharded
from tests.fake_cuda.world import World, fake_gpus
from towpath import Outer, Precision
from towpath.optim import chain

small = mock.patch("towpath.core.transport.SMALLEST_BYTES", 1)  # exact transports leave out small messages


def passes(gpus: World, model: Any) -> None:
    """Two micro-steps, in which the host must not wait."""
    with gpus.cuda.no_waits("in a pass"):
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()


@on_gpus()
@small
def test_exact_transports_wait_once_in_a_step_and_never_in_a_pass() -> None:
    for name, precision, apart in (
        ("paro-iig", Precision(), False),
        ("paro-iig", Precision(params=torch.bfloat16, reduce=torch.float32), True),
        ("zero1", Precision(), True),
    ):
        with fake_gpus(2, 2) as gpus:
            strategy = towpath.strategy(name, gpus.topology, exact=True)
            model: Any = towpath.shard(net(), strategy, topology=gpus.topology, precision=precision)
            matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
            groups = (matrices, others) if apart else ([*matrices, *others],)
            optimizer = chain(*(torch.optim.AdamW(group, lr=0.01) for group in groups))

            def step(gpus: World = gpus, model: Any = model, optimizer: Any = optimizer) -> None:
                passes(gpus, model)
                optimizer.step()
                optimizer.zero_grad()

            check_waits(gpus.cuda, step, most=1)
            assert "_write_kernel" in gpus.launches


@on_gpus()
def test_an_exchange_between_islands_is_applied_without_a_wait() -> None:
    for name, outer in (
        ("zero1", Outer(every=1, nccl=True)),
        ("zero3", Outer(every=2, fragments=2, delay=1, blend=0.5, nccl=True)),
        ("paro-igg", Outer(every=2, delay=1)),
    ):
        with fake_gpus(2, 2) as gpus:
            model = sharded(gpus.topology, name, outer=outer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

            def step(gpus: World = gpus, model: Any = model, optimizer: Any = optimizer) -> None:
                passes(gpus, model)
                optimizer.step()
                optimizer.zero_grad()

            check_waits(gpus.cuda, step, steps=6)
