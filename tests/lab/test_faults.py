"""A rank that dies, stays away or loses its link ends the others with an error that names transfer and peers."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import towpath
from benchmarks import gpt
from lab.lab import PRELOAD
from lab.links import CABLE
from tests.lab.warm import warm_lab
from tests.ranks.strategies import seldom
from towpath.engine.agree import watchdog
from towpath.errors import StepError

SHAPE = towpath.Topology(2, 2)
THREE_NODES = towpath.Topology(3, 1)
# How long a process group waits for a peer: more than a busy machine keeps a rank that lives.
PATIENCE_SECONDS = 5
# Nothing takes that long, on whatever machine: what does, hangs.
HANGS_SECONDS = 300
# Each rank would otherwise import them.
MODULES = (*PRELOAD, "towpath.api", "tests.lab.test_faults")


def _train(
    rank: int,
    world: int,
    strategy: str,
    stop: Callable[[], None],
    shape: towpath.Topology,
    patience_seconds: float = PATIENCE_SECONDS,
) -> str | None:
    """Train until the last rank takes no part any more: the error this rank ended with."""
    torch.manual_seed(0)
    group = dist.new_group(timeout=timedelta(seconds=patience_seconds))
    model: Any = towpath.shard(gpt.GPT(width=48, depth=3, heads=2, context=32), strategy, topology=shape, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = gpt.batches(rank, batch=1, length=32)
    for step in range(3):
        if step == 2:
            _tell_victim(rank, group)
            if rank == world - 1:
                stop()
                return None
        try:
            model(*next(data)).backward()
        except StepError as error:
            if step < 2:
                raise  # nothing was stopped yet
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("nothing stopped the step without the last rank")


def _tell_victim(rank: int, group: Any) -> None:
    """That nobody waits for it any more: its last messages might not have left when it ends, or its link does."""
    word, victim = torch.zeros(1), dist.get_world_size() - 1
    if rank != victim:
        dist.send(word, victim, group=group)
        return
    for other in range(victim):
        dist.recv(word, other, group=group)


def _die() -> None:
    """Answer the lab, then be gone without taking leave of anybody: the signal ends a process by default."""
    signal.setitimer(signal.ITIMER_REAL, 2.0)


def _stay_away() -> None:
    """Alive, connected, and elsewhere."""


def _lose_the_link() -> None:
    subprocess.run(["ip", "link", "set", CABLE, "down"], check=True)


@pytest.mark.parametrize(
    "stop, strategy, shape",
    [
        seldom(_die, "zero3", SHAPE),
        seldom(_stay_away, "paro-iig", SHAPE),
        (_lose_the_link, "zero3", THREE_NODES),
        seldom(_die, "paro-iig", THREE_NODES),
        seldom(_stay_away, "zero3", THREE_NODES),
        seldom(_lose_the_link, "paro-iig", SHAPE),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_others_end_with_an_error_that_names_the_transfer_and_the_peers(
    strategy: str, stop: Callable[[], None], shape: towpath.Topology
) -> None:
    with warm_lab(shape, preload=MODULES) as lab:
        ends = lab.call(_train, strategy, stop, shape, timeout_seconds=HANGS_SECONDS)
    for rank, text in enumerate(ends[:-1]):
        assert text.startswith(f"rank {rank}: ")
        assert "peers (rank " in text
        assert " of root [float32]" in text or " of blocks." in text or " of all units" in text


def test_a_lost_machine_is_noticed_long_before_the_timeout() -> None:
    with warm_lab(THREE_NODES, preload=MODULES) as lab:
        ends = lab.call(_train_watched, timeout_seconds=HANGS_SECONDS / 2)
    for rank, text in enumerate(ends[:-1]):
        assert text.startswith(f"rank {rank}: the process of rank 2 has ended or no longer answers"), text
        assert "waits for" in text and "its machine or its link is lost" in text, text


def _train_watched(rank: int, world: int) -> str | None:
    watchdog._KEEPALIVE = 1, 1, 2  # not 60 seconds
    return _train(rank, world, "zero3", _lose_the_link, THREE_NODES, HANGS_SECONDS)


@pytest.mark.parity  # TCP waits for longer than the cable is cut
def test_a_cable_that_returns_soon_ends_nothing() -> None:
    with warm_lab(THREE_NODES, preload=MODULES) as lab:
        assert lab.call(_train_meanwhile, timeout_seconds=HANGS_SECONDS) == [4, 4, 4]


def _train_meanwhile(rank: int, world: int) -> int:
    """Train over an outage: the number of steps."""
    watchdog._KEEPALIVE = 3, 1, 9  # not 60 seconds
    model = towpath.shard(torch.nn.Linear(8, 8), "zero3", topology=THREE_NODES)
    steps = 0
    while steps < 4:
        if steps == 2 and rank == world - 1:
            _lose_the_link()
            threading.Timer(6.0, subprocess.run, [["ip", "link", "set", CABLE, "up"]], {"check": True}).start()
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
        steps += 1
    return steps
