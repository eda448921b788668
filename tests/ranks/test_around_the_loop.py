"""What people do around a training loop: schedulers, averages of weights, autocast, loss scaling.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import towpath
from tests.ranks.models import DEVICE
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.test_never_silent import Net, _loss
from tests.ranks.twin import Twin, mean_of_all_ranks

SHAPE = towpath.Topology(2, 1)
LABELS = ("zero3", "zero1", "paro-iig")


def test_schedulers_and_averages_of_weights_are_those_of_one_process(world: Worlds) -> None:
    world(2).run(_schedule_and_average)


def _schedule_and_average() -> None:
    for label in LABELS:
        twin = Twin(Net, _loss, label, SHAPE)
        pairs = ((twin.sharded, twin.optimizer), (twin.plain, twin.plain_optimizer))
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6) for _, optimizer in pairs]
        averages = [[p.detach().clone() for p in model.parameters()] for model, _ in pairs]
        for step in range(4):
            twin.backward(step)
            twin.step()
            for scheduler in schedulers:
                scheduler.step()
            for average, (model, _) in zip(averages, pairs, strict=True):
                torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
        twin.check_parameters()
        rates = [optimizer.param_groups[0]["lr"] for _, optimizer in pairs]
        assert rates[0] == rates[1] != 2e-3
        for found, expected in zip(*averages, strict=True):
            assert (found.full_tensor() - expected).abs().max() <= 1e-10, label


@pytest.mark.parity
@on_ranks(2)
def test_the_datas_workers_run_beside_the_queues() -> None:
    """They are forked from a process whose queues and process groups have threads."""
    multiprocessing.current_process()._config["daemon"] = False  # a rank of these tests may not have children else
    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(dist.get_rank())).double()
    twin = Twin(Net, _loss, LABELS[0], SHAPE)
    twin.train(1)  # the queues are at work when the workers are forked
    for (batch,), expected in zip(DataLoader(TensorDataset(data), 3, num_workers=2), data.split(3), strict=True):
        assert torch.equal(batch, expected)
        twin.sharded(batch).square().mean().backward()
        with mean_of_all_ranks(twin.plain):
            twin.plain(expected).square().mean().backward()
        twin.step()
    twin.check_parameters()


def test_under_autocast_gradients_are_those_of_the_plain_model(world: Worlds) -> None:
    world(2).run(_autocast)


def _autocast() -> None:
    """Each operation computes in bf16 from weights in fp32. Sums of two ranks in fp32: equal but for the last bits."""
    rank = dist.get_rank()
    for label in LABELS:
        torch.manual_seed(1)
        plain = Net().to(DEVICE)
        model: Any = towpath.shard(copy.deepcopy(plain), label, topology=SHAPE)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank)).to(DEVICE)
        for each, context in ((model, None), (plain, mean_of_all_ranks(plain))):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = each(x).float().square().mean()
            if context is None:
                loss.backward()
            else:
                with context:
                    loss.backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert found.grad.dtype == torch.float32
            largest = expected.grad.abs().max()
            assert (found.grad.full_tensor() - expected.grad).abs().max() <= 1e-6 * largest, label


def test_fp16_with_loss_scaling_skips_the_same_steps_as_one_process(world: Worlds) -> None:
    world(2).run(_scaled)


def _scaled() -> None:
    """The loss of step 1 overflows on one rank: no rank steps, and the scale halves on all."""

    def loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
        return _loss(model, rank, micro, step) * (float("inf") if (rank, step) == (1, 1) else 1.0)

    for label in LABELS:
        twin = Twin(Net, loss, label, SHAPE)
        scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
        for step in range(4):
            scalers[0].scale(loss(twin.sharded, dist.get_rank(), 0, step)).backward()
            with mean_of_all_ranks(twin.plain):
                scalers[1].scale(loss(twin.plain, dist.get_rank(), 0, step)).backward()
            for scaler, optimizer in zip(scalers, (twin.optimizer, twin.plain_optimizer), strict=True):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert scalers[0].get_scale() < 512.0  # halved once, doubled once: not as if nothing had overflowed
        twin.check_parameters()
