"""Steps on a GPU, without a GPU: no operation mixes devices, and the host never waits for the device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import towpath
from tests.fake_cuda.world import World, fake_gpus
from tests.ranks.server import on_ranks

WIDTH = 96


class Net(nn.Module):
    """Three units and a root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(gpus: World, name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return towpath.shard(Net().to("cuda"), towpath.strategy(name, gpus.topology, **options), topology=gpus.topology)


def train(gpus: World, model: Any, steps: int = 3, waits: int = 0) -> None:
    """Train so many steps of two micro-steps. From the third on the host may wait `waits` times, and in no pass."""
    # In the second step ranks compare the parameters that they began with (`check_every`). It is the only one in 100.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.ones(2, WIDTH, device="cuda")
    for step in range(steps):
        steady = step > 1
        with gpus.cuda.counted() as counted:
            with gpus.cuda.no_waits(f"in a pass of step {step}") if steady else nullcontext():
                with model.no_sync():
                    model(x).square().sum().backward()
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not steady or len(counted) <= waits, [str(wait) for wait in counted]


@on_ranks(1)
def test_no_preset_waits_in_a_step() -> None:
    for name in towpath.strategies():
        with fake_gpus(2, 2) as gpus:
            train(gpus, sharded(gpus, name))
