"""Checkpoints of Towpath 0.2 before its kinds of transfers were renamed: codec state included, they still load.

`tests/data/checkpoints-0.2` holds two, of two ranks each: `int8` under zero2, and `low-rank` under ddp. Functions whose
names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks.server import World
from towpath import checkpoint

DATA = Path(__file__).parents[1] / "data" / "checkpoints-0.2"
# The sums of the next step's gradients as the run that wrote the checkpoint went on.
NEXT = {
    "int8": [6.34782668761909, 11.62312525510788, -10.911448810482398, -0.39272060990333557],
    "low-rank": [-13.97885954985395, 10.392462693154812, 6.545835676195566, 1.254784256219864],
}


def _goes_on(name: str, strategy: towpath.Strategy) -> None:
    model = towpath.shard(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaded = checkpoint.load(DATA / name, checkpoint.State(model, optimizer))
    assert loaded is not None and (loaded.step, loaded.notes) == (2, ())
    generator = torch.Generator().manual_seed(20 + dist.get_rank())
    model(torch.randn(4, 32, generator=generator)).square().sum().backward()
    sums = [float(towpath.full_tensor(p.grad).double().sum()) for p in model.parameters() if p.grad is not None]
    assert sums == pytest.approx(NEXT[name], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "preset", "codec", "feedback"),
    [("int8", "zero2", "int8:32", "both"), ("low-rank", "ddp", "low-rank:2", "first")],
)
def test_a_run_goes_on_with_its_codec_state(
    world: Callable[[int], World], name: str, preset: str, codec: str, feedback: Literal["both", "first"]
) -> None:
    strategy = towpath.strategy(preset, towpath.Topology(2, 1), gradients=codec, feedback=feedback)
    world(2).run(_goes_on, name, strategy)
