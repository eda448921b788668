"""Islands that come and go: each is a world of ranks of its own here, and they find each other by an address.

Functions whose names begin with an underscore run on every rank of an island.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks.checkpoints import content, differing
from tests.ranks.models import MODELS
from tests.ranks.server import RankError, World, Worlds
from tests.ranks.strategies import seldom
from tests.ranks.test_outer import TOLERANCE
from towpath import Outer, Topology, Transport
from towpath.errors import ConfigError, StepError
from towpath.outer import islands as islands_module
from towpath.outer import meeting

EVERY = 4
GPT = MODELS["gpt"]
STREAMING = Outer(every=EVERY, fragments=2, delay=1, blend=0.25)
PLAIN = Outer(every=EVERY)
ROUNDED = Outer(every=EVERY, transport=Transport("flat", "int4", feedback="all"))


@pytest.fixture
def meet() -> Generator[str]:
    """An address that is free, and that the system gives to nobody else."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))  # bound, and not listening: an island may listen there
        yield f"127.0.0.1:{held.getsockname()[1]}"


class Jobs:
    """Islands: worlds of ranks, each with a process group of its own, that run at the same time."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks, self._pool = ranks, ThreadPoolExecutor(8)
        self.worlds: list[World] = []

    def start(self, fn: Callable[..., Any], *args: Any) -> Future[list[Any]]:
        """`fn(*args)` on each rank of a new island."""
        world = World(self._ranks)
        self.worlds.append(world)
        return self._pool.submit(world.run, fn, *args)

    def close(self) -> None:
        for world in self.worlds:
            world.close()
        self._pool.shutdown()


@pytest.fixture
def jobs() -> Generator[Jobs]:
    made = Jobs()
    yield made
    made.close()


@pytest.fixture
def pairs() -> Generator[Jobs]:
    """Islands of two ranks."""
    made = Jobs(2)
    yield made
    made.close()


class _Training:
    """An island's training on a rank. Until `count` islands train, its weights do not change."""

    def __init__(self, outer: Outer | None, label: str, dtype: torch.dtype = torch.float64) -> None:
        meeting._ALONE_SECONDS, meeting._LOOK_SECONDS = 0.3, 0.1
        world = dist.get_world_size()
        self.dtype, self.said = dtype, list[str]()
        self.model: Any = towpath.shard(GPT.make(dtype), towpath.strategy(label, Topology(1, world), outer=outer))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.sync: Any = self.model.towpath_engine.outer
        if outer is not None and outer.meet:
            self.sync.say = self.said.append

    def step(self, number: int, step: int, lr: float = 0.05) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        rank = number * dist.get_world_size() + dist.get_rank()
        GPT.loss(self.model, *GPT.micro_batch(rank, 0, step, self.dtype)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gather(self, count: int) -> int:
        """Meet the others. Return the step after which `count` islands train, a multiple of the period."""
        island = towpath.meet_islands(self.model)
        step = island.step
        while self.sync.present < count or step % EVERY:
            self.step(island.number, step, lr=0.0)
            step += 1
            self.model.towpath_engine.sync_islands()
            self.sync.wait()
        return step

    def train(self, first: int, steps: int) -> None:
        """Train so many steps, on the batches of this island's number."""
        for step in range(steps):
            self.step(self.sync.number, first + step)

    def content(self) -> Any:
        self.model.towpath_engine.sync_islands()
        return content(self.model, self.optimizer)


def _train(outer: Outer, label: str, count: int, steps: int, dtype: torch.dtype = torch.float32) -> Any:
    run = _Training(outer, label, dtype)
    run.gather(count)
    run.train(0, steps)
    return run.sync.number, run.content(), run.said, run.sync.dropped


def _train_as_one_job(outer: Outer, label: str, islands: int, steps: int) -> Any:
    """What islands of one job come to. As those that meet, they begin with a period in which nothing changes."""
    topology, rank = Topology(islands, dist.get_world_size() // islands), dist.get_rank()
    model: Any = towpath.shard(GPT.make(torch.float32), towpath.strategy(label, topology, outer=outer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(-EVERY, steps):
        optimizer.param_groups[0]["lr"] = 0.05 if step >= 0 else 0.0
        GPT.loss(model, *GPT.micro_batch(rank, 0, max(step, 0), torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.towpath_engine.sync_islands()
    return content(model, optimizer)


def at(outer: Outer, meet: str) -> Outer:
    return Outer(outer.every, outer.fragments, outer.delay, blend=outer.blend, transport=outer.transport, meet=meet)


@pytest.mark.parametrize("outer", [PLAIN, seldom(STREAMING), ROUNDED], ids=["plain", "streaming", "int4"])
def test_islands_that_are_all_there_have_the_bits_of_one_job(
    world: Worlds, jobs: Jobs, meet: str, outer: Outer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = world(3).run(_train_as_one_job, outer, "zero3", 3, 2 * EVERY + 2)
    found = [each.result()[0] for each in [jobs.start(_train, at(outer, meet), "zero3", 3, 2 * EVERY + 2) for _ in "abc"]]
    for number, weights, said, dropped in found:
        assert differing(weights, expected[number]) == []
        assert dropped == 0 and sum("joined at step" in text for text in said) >= 1


@pytest.mark.parametrize("label", ["paro-iig", seldom("ddp")])
def test_islands_of_two_ranks_have_the_bits_of_one_job(world: Worlds, pairs: Jobs, meet: str, label: str) -> None:
    expected = world(4).run(_train_as_one_job, STREAMING, label, 2, 2 * EVERY + 2)
    for each in [pairs.start(_train, at(STREAMING, meet), label, 2, 2 * EVERY + 2) for _ in "ab"]:
        for rank, (number, weights, _, _) in enumerate(each.result()):
            assert differing(weights, expected[2 * number + rank]) == []
