"""Ranks whose GPUs wait in vain are told why, and inference keeps nothing. Skipped, and counted, without CUDA."""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import towpath
from benchmarks.harness.shared_gpu import share_gpu
from towpath.errors import StepError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Experts(nn.Module):
    """Runs those that it is told to; they have different sizes, so that other ranks' gathers never match."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Sequential(nn.Linear(8, 8 * (i + 1)), nn.Linear(8 * (i + 1), 8)) for i in range(3))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.all[chosen](x)


def _sharded() -> Any:
    torch.manual_seed(0)
    topology = towpath.Topology(dist.get_world_size(), 1)
    return towpath.shard(Experts().cuda(), "zero3", topology=topology, units=[nn.Sequential])


def test_ranks_that_gather_different_units_are_told_while_their_hosts_wait_for_the_device() -> None:
    _spawn(2, _gather_differently)


def _gather_differently() -> None:
    model = _sharded()
    with pytest.raises(StepError, match="the ranks ran different units"), torch.no_grad():
        y = model(torch.ones(1, 8, device="cuda"), dist.get_rank())
        with suppress(RuntimeError):
            y.sum().item()  # the device never gets there; what the abort makes of it is no number to use
        model(torch.ones(1, 8, device="cuda"), 0)
    os._exit(0)  # what was aborted cannot be destroyed


def test_a_rank_whose_peer_has_ended_is_told_while_its_host_waits_for_the_device() -> None:
    _spawn(2, _end_alone)


def _end_alone() -> None:
    model = _sharded()
    model(torch.ones(1, 8, device="cuda"), 0).sum().backward()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(StepError, match="the process of rank 1 has ended"), torch.no_grad():
        y = model(torch.ones(1, 8, device="cuda"), 1)
        with suppress(RuntimeError):
            y.sum().item()
        model(torch.ones(1, 8, device="cuda"), 1)
    os._exit(0)


def test_inference_keeps_no_events() -> None:
    _spawn(2, _infer)


def _infer() -> None:
    model = _sharded()
    x, held = torch.ones(1, 8, device="cuda"), list[int]()
    for count in (500, 4_500):
        with torch.no_grad():
            for _ in range(count):
                model(x, 0)
        torch.cuda.synchronize()
        towpath.stats(model)  # reads what the device has finished
        gc.collect()
        held.append(sum(isinstance(each, torch.cuda.Event) for each in gc.get_objects()))
    assert held[1] <= held[0], held


def _spawn(world: int, work: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (world, Path(folder, "meeting"), work), nprocs=world)  # pyright: ignore


def _rank(rank: int, world: int, meeting: Path, work: Any) -> None:
    share_gpu(rank)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else the watchdog may end the process before it raises
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    try:
        work()
    finally:
        dist.destroy_process_group()
