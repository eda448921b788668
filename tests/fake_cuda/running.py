"""Tests on the fake device: they run on ranks, and note which branches of the sources ran there."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import towpath
from tests.fake_cuda.branches import Branch, branches, recording
from tests.fake_cuda.runtime import Runtime
from tests.ranks.server import World

WIDTH = 96

marked: dict[str, set[str]] = {}  # the tests that are marked, by module
ended: dict[str, set[str]] = {}  # those of them that have run
ran: set[Branch] = set()  # the branches that ran there


def on_gpus(ranks: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test whose body runs on each of so many ranks. Its parameters are sent there."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(world: Callable[[int], World], **arguments: Any) -> None:
            # Ranks get the list of branches: to find them takes seconds, and would take them on each rank.
            ran.update(*world(ranks).run(_recorded, test.__module__, test.__name__, arguments, branches()))
            ended.setdefault(test.__module__, set()).add(test.__name__)

        marked.setdefault(test.__module__, set()).add(test.__name__)
        signature = inspect.signature(test)
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        made: Any = run
        made.__signature__ = signature.replace(parameters=[world, *signature.parameters.values()])
        return run

    return mark


def _recorded(module: str, test: str, arguments: dict[str, Any], known: frozenset[Branch]) -> set[Branch]:
    body = getattr(importlib.import_module(module), test).__wrapped__
    with recording(known) as found:
        body(**arguments)
    return found


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


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().to("cuda")


def sharded(topology: towpath.Topology, name: str, **options: Any) -> Any:
    return towpath.shard(net(), towpath.strategy(name, topology, **options), topology=topology)


def batch() -> torch.Tensor:
    return torch.ones(2, WIDTH, device="cuda")


def loss_of(model: Any) -> torch.Tensor:
    return model(batch()).square().mean()


def check_waits(cuda: Runtime, step: Callable[[], Any], most: int = 0, steps: int = 4) -> None:
    """Run so many steps. From the third on the host may wait `most` times in each."""
    # In the second step ranks compare the parameters that they began with (`check_every`): once in 100 steps.
    for number in range(steps):
        with cuda.counted() as waits:
            step()
        assert number < 2 or len(waits) <= most, "\n".join(map(str, waits))
